"""What make hands on: the real make and shell, and a Python that only writes down how it was called."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(file.stem for file in (ROOT / "recipes" / "llama").glob("*.yaml"))
SAYS_HOW = f"""#!{sys.executable}
import json, sys, time
try:
    print(json.dumps(sys.argv[1:]), flush=True)
    time.sleep(30 if "--sleep" in sys.argv else 0)
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(7 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def start(tmp_path):
    """Starts make with SLIPWAY_PYTHON set, as in the image."""
    stub = tmp_path / "python"
    stub.write_text(SAYS_HOW)
    stub.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLIPWAY_")} | {"SLIPWAY_PYTHON": str(stub)}

    def starter(*words: str, **more: str) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["make", *words], cwd=ROOT, env=environ | more, start_new_session=True, **pipes)

    return starter


@pytest.fixture
def make(start):
    def maker(*words: str, **more: str) -> tuple[int, list[list[str]], str]:
        """(exit code, arguments of each call of Python but the one for .venv, stderr)."""
        process = start(*words, **more)
        out, err = process.communicate(timeout=30)
        calls = [json.loads(line) for line in out.splitlines()]
        return process.returncode, [call for call in calls if call != ["scripts/make_venv.py"]], err

    return maker


def finetune(recipe: str) -> list[str]:
    return ["recipes/llama/finetune.py", "--config", f"recipes/llama/{recipe}.yaml"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_is_a_target_word(make, recipe):
    code, calls, _ = make("finetune-llama", f"RECIPE={recipe}")
    assert (code, calls) == (0, [["scripts/launch.py", *finetune(recipe)]])


@pytest.mark.parametrize("words", [[], ["RECIPE=", "MODEL=", "DATA=", "OUTPUT=", "NPROC=", "ATTN=", "ARGS="]])
def test_what_is_empty_is_not_passed_and_zero3_is_the_default(make, words):
    assert make("finetune-llama", *words) == (0, [["scripts/launch.py", *finetune("zero3")]], "")


def test_values_arrive_as_they_were_typed(make):
    model, data, prompt = "a 'b' \"c\" $HOME `id`", "my data;ls.jsonl", "What's $5?\nAnd $(this)?"
    words = [
        "NPROC=2",
        f"MODEL={model}",
        f"DATA={data}",
        "OUTPUT=o ut",
        "ATTN=sdpa",
        "ARGS=--x 'y z' --seed 1",
    ]
    _, calls, _ = make("finetune-llama", *words)
    flags = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", "o ut", "--attn", "sdpa"]
    want = ["scripts/launch.py", "--nproc", "2", *finetune("zero3"), *flags, "--x", "y z", "--seed", "1"]
    assert calls == [want]
    _, calls, _ = make("generate", f"PROMPT={prompt}", MODEL=model)
    assert calls == [["scripts/generate.py", "--model", model, "--prompt", prompt]]


def test_the_plan_of_a_resume_is_asked_with_the_words_of_the_start(make):
    words = ["RECIPE=zero2", "NPROC=4", "MODEL=tiny-llama", "OUTPUT=o ut", "ARGS=--seed 1"]
    flags = ["--model_name_or_path", "tiny-llama", "--output_dir", "o ut"]
    for more, path in (([], "auto"), (["RESUME=o ut/checkpoint-4"], "o ut/checkpoint-4")):
        want = ["scripts/launch.py", "--nproc", "4", "--resume_plan", *finetune("zero2"), *flags, "--resume", path]
        assert make("resume-plan", *words, *more) == (0, [[*want, "--seed", "1"]], "")


def test_export_gets_a_checkpoint_and_a_folder(make):
    words = ["CHECKPOINT=my run/checkpoint-4", "OUTPUT=o ut", "ARGS=--dtype bf16"]
    want = ["scripts/export.py", "--checkpoint", "my run/checkpoint-4", "--output", "o ut", "--dtype", "bf16"]
    assert make("export", *words)[1] == [want]


def test_train_bert_needs_no_word_and_hands_on_those_it_gets(make):
    start = ["scripts/launch.py", "recipes/bert/train.py"]
    assert make("train-bert") == (0, [start], "")
    words = ["NPROC=2", "MODEL=minilm", "DATA=my data.csv", "OUTPUT=o ut", "RESUME=auto", "RESTARTS=1", "ARGS=--seed 1"]
    flags = ["--model", "minilm", "--data", "my data.csv", "--output_dir", "o ut", "--resume", "auto"]
    want = [start[0], "--nproc", "2", "--restarts", "1", start[1], *flags, "--seed", "1"]
    assert make("train-bert", *words)[1] == [want]


def test_an_unknown_recipe_ends_in_make_itself_and_lists_the_known(make):
    code, calls, err = make("finetune-llama", "RECIPE=zero4")
    assert (code, calls) == (2, [])
    assert f"No recipe zero4. Recipes: {', '.join(RECIPES)}." in err


def test_the_exit_code_is_said(make):
    code, _, err = make("finetune-llama", "ARGS=--fail")
    assert code == 2 and re.search(r"finetune-llama\] Error 7", err)


def test_ctrl_c_reaches_the_launcher_and_its_exit_code_is_said(start):
    process = start("finetune-llama", "ARGS=--sleep")
    while "launch.py" not in process.stdout.readline():
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "Error 130" in err and process.returncode == -signal.SIGINT


def test_help_lists_every_target_and_recipe():
    environ = {k: v for k, v in os.environ.items() if k != "SLIPWAY_PYTHON"}
    page = subprocess.run(["make"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert [line.split()[0] for line in page.splitlines() if line.startswith("  ")] == [
        *phony,
        *(f"RECIPE={recipe}" for recipe in RECIPES),
    ]
    assert all(re.search(rf"RECIPE={recipe} +\w", page) for recipe in RECIPES)
