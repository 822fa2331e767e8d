# One target, one script: no logic here. `make` lists the targets.

override RECIPE := $(or $(RECIPE),zero3)
VENV := $(or $(SLIPWAY_VENV),.venv)
# The image sets SLIPWAY_PYTHON, and no .venv is made there.
PYTHON := $(or $(SLIPWAY_PYTHON),$(VENV)/bin/python)

# Values may hold spaces, quotes and dollars: they reach the shell in the environment and never as text of a recipe.
# $(call flag,--model,MODEL) gives the flag and its value, or nothing where MODEL is empty. ARGS is words for the shell.
export SLIPWAY_MODEL := $(value MODEL)
export SLIPWAY_DATA := $(value DATA)
export SLIPWAY_OUTPUT := $(value OUTPUT)
export SLIPWAY_NPROC := $(value NPROC)
export SLIPWAY_ATTN := $(value ATTN)
export SLIPWAY_RESUME := $(value RESUME)
export SLIPWAY_RESTARTS := $(value RESTARTS)
export SLIPWAY_PROMPT := $(value PROMPT)
export SLIPWAY_ONLY := $(value ONLY)
export SLIPWAY_CHECKPOINT := $(value CHECKPOINT)
unexport CHECKPOINT MODEL DATA OUTPUT NPROC ATTN RESUME RESTARTS PROMPT ONLY ARGS BASE CA_BUNDLE FLASH_ATTN
flag = $${SLIPWAY_$(2):+$(1) "$$SLIPWAY_$(2)"}

comma := ,
space := $() $()
recipes := $(subst $(space),$(comma)$(space),$(sort $(basename $(notdir $(wildcard recipes/llama/*.yaml)))))
MAKEFLAGS += --no-print-directory
.PHONY: help venv verify lock finetune-llama resume-plan train-bert export generate bench scaling test soak lint clean image image-test image-size shell

help:  ## list the targets and recipes
	@$(or $(SLIPWAY_PYTHON),python3) scripts/help.py

venv:  ## make .venv from docker/requirements.lock, if there is something to do (every target does it)
	@$(or $(SLIPWAY_PYTHON),python3) scripts/make_venv.py

verify: venv  ## say what this machine can do, and what to mend: ONLY=name,name JSON=1
	@exec $(PYTHON) scripts/verify.py $(if $(JSON),--json) $(call flag,--only,ONLY)

lock: venv  ## rewrite docker/requirements.lock, and README's table of pins, from docker/requirements.in
	@$(PYTHON) scripts/pins.py write $(ARGS)

# `exec` takes the shell out of the way: signals reach the launcher, and its exit code is what make reports.
finetune-llama: recipes/llama/$(RECIPE).yaml venv  ## fine-tune: RECIPE= MODEL= DATA= OUTPUT= NPROC= ATTN= RESUME= RESTARTS= ARGS='--flag value'
	@exec $(PYTHON) scripts/launch.py $(call flag,--nproc,NPROC) $(call flag,--restarts,RESTARTS) recipes/llama/finetune.py --config $< \
	$(call flag,--model_name_or_path,MODEL) $(call flag,--dataset_name,DATA) $(call flag,--output_dir,OUTPUT) $(call flag,--attn,ATTN) $(call flag,--resume,RESUME) $(ARGS)

resume-plan: recipes/llama/$(RECIPE).yaml venv  ## what RESUME=auto would do, and what it takes, with nothing started: as finetune-llama
	@exec $(PYTHON) scripts/launch.py $(call flag,--nproc,NPROC) --resume_plan recipes/llama/finetune.py --config $< \
	$(call flag,--model_name_or_path,MODEL) $(call flag,--dataset_name,DATA) $(call flag,--output_dir,OUTPUT) $(call flag,--attn,ATTN) --resume "$${SLIPWAY_RESUME:-auto}" $(ARGS)

recipes/llama/%.yaml:
	$(if $(wildcard $@),,$(error No recipe $*. Recipes: $(recipes)))

train-bert: venv  ## train BERT to tell classes apart: MODEL= DATA= OUTPUT= NPROC= RESUME= RESTARTS= ARGS='--flag value'; none: a dummy job
	@exec $(PYTHON) scripts/launch.py $(call flag,--nproc,NPROC) $(call flag,--restarts,RESTARTS) recipes/bert/train.py \
	$(call flag,--model,MODEL) $(call flag,--data,DATA) $(call flag,--output_dir,OUTPUT) $(call flag,--resume,RESUME) $(ARGS)

export: venv  ## a checkpoint as plain safetensors: CHECKPOINT=OUTPUT/checkpoint-N OUTPUT= ARGS='--dtype bf16 --shard_size 2GB --merge'
	@exec $(PYTHON) scripts/export.py $(call flag,--checkpoint,CHECKPOINT) $(call flag,--output,OUTPUT) $(ARGS)

generate: venv  ## answer with a model: MODEL=OUTPUT PROMPT='...' ARGS=
	@exec $(PYTHON) scripts/generate.py $(call flag,--model,MODEL) $(call flag,--prompt,PROMPT) $(ARGS)

bench: venv  ## tokens/s of the default recipe beside a plain Trainer and a bare torch loop
	@exec $(PYTHON) scripts/bench.py $(ARGS)

scaling: venv  ## why is it not faster: steps/s on 1 and N ranks, where a step's time goes, what bounds it: NPROC= OUTPUT= ARGS=
	@exec $(PYTHON) scripts/scaling.py $(call flag,--nproc,NPROC) $(call flag,--output,OUTPUT) $(ARGS)

test: venv  ## all tests that this machine can run: ARGS='-k name'
	@exec $(PYTHON) -m pytest -q $(ARGS)

soak: venv  ## kill runs at random moments and resume them: KILLS=200 (half an hour), ARGS=
	@SLIPWAY_KILLS=$(or $(KILLS),200) exec $(PYTHON) -m pytest -q --timeout 0 tests/test_surviving.py -k killed_at_any_moment $(ARGS)

lint: venv  ## ruff, yamllint, shellcheck, hadolint, JSON, ds_configs, recipes, pins
	@$(PYTHON) scripts/lint.py

clean:  ## remove what the tests and tools leave; outputs/ and .venv stay
	@rm -rf build .pytest_cache .ruff_cache *.egg-info

# The image is built and looked at by any Python 3.9 on the host: no .venv is needed. Its tests run in .venv's pytest.
export SLIPWAY_BASE := $(value BASE)
export SLIPWAY_CA_BUNDLE := $(value CA_BUNDLE)
export SLIPWAY_FLASH_ATTN := $(value FLASH_ATTN)
HOST = PYTHONPATH=. exec $(or $(SLIPWAY_PYTHON),python3)

image:  ## build the image: BASE=standin (no registry) CA_BUNDLE=ca.pem (behind a proxy) FLASH_ATTN=wheel|source|none ARGS=
	@$(HOST) scripts/image.py build $(call flag,--base,BASE) $(call flag,--ca,CA_BUNDLE) $(call flag,--flash-attn,FLASH_ATTN) $(ARGS)

image-test: venv  ## test the image from outside and inside: ARGS='-k name'
	@exec $(PYTHON) scripts/image.py test $(ARGS)

image-size:  ## size of the image by layer
	@$(HOST) scripts/image.py size

shell:  ## a shell in the image, with this folder mounted
	@$(HOST) scripts/image.py shell
