"""scripts/generate.py as a user starts it: answers on stdout, messages on stderr, and its exit codes."""

import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import accelerate
import model_zoo
import pytest
import torch
from harness import ROOT, run
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipway import embedded, models
from slipway.errors import InputError

SCRIPT = ROOT / "scripts" / "generate.py"
PROMPT = ["--prompt", "Name a colour.", "--max_new_tokens", 6]


def generate(*arguments: object) -> subprocess.CompletedProcess:
    return run(sys.executable, SCRIPT, *arguments, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")


def finished(folder: Path) -> Path:
    """An OUTPUT folder of a finished run, with a checkpoint that nothing should read."""
    (folder / "checkpoint-9").mkdir(parents=True)
    (folder / "checkpoint-9" / "model.safetensors").touch()
    shutil.copytree(embedded.folder("tiny-llama"), folder, dirs_exist_ok=True)
    return folder


def unfinished(folder: Path) -> Path:
    """An OUTPUT folder with checkpoints only; the newest by number, and by name the last, hold no weights."""
    shutil.copytree(embedded.folder("tiny-llama"), folder / "checkpoint-10")
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-20").mkdir()
    return folder


def adapter(folder: Path) -> Path:
    base = AutoModelForCausalLM.from_pretrained(embedded.folder("tiny-llama"))
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)  # B is 0 at first
    return folder


@pytest.fixture(scope="module")
def expected() -> str:
    """The answer of tiny-llama to PROMPT."""
    model = models.resolve("tiny-llama")
    tokenizer = models.load_tokenizer(model)
    loaded = AutoModelForCausalLM.from_pretrained(model.path)
    question = [{"messages": [{"role": "user", "content": PROMPT[1]}]}]
    return models.answers(loaded, tokenizer, question, max_new_tokens=6)[0]


def test_the_command_prints_the_answer_alone_on_stdout(expected):
    done = generate("--model", "tiny-llama", *PROMPT)
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert "pad token:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("make", "said"),
    [(finished, ""), (unfinished, "no finished model; answering from {}/checkpoint-10"), (adapter, "")],
    ids=["finished", "unfinished", "adapter"],
)
def test_answers_from_what_a_run_left(tmp_path, capsys, expected, make, said):
    folder = make(tmp_path / "output")
    runpy.run_path(str(SCRIPT))["main"](["--model", str(folder), *map(str, PROMPT)])
    shown = capsys.readouterr()
    assert shown.out == expected + "\n" and said.format(folder) in shown.err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--model", "./missing", *PROMPT], "MODEL=missing does not exist"),
        (["--model", "tiny-llama", "--prompt", " "], "--prompt is empty"),
        (["--model", "tiny-llama", *PROMPT[:2], "--max_new_tokens", 0], "--max_new_tokens 0"),
        (["--model", "tiny-llama", *PROMPT, "--temperature", -1], "--temperature -1"),
        (["--model", "tiny-llama"], "required: --prompt"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(arguments, found):
    done = generate(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and found in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c_ends_with_130_and_no_traceback():
    words = [
        sys.executable,
        str(SCRIPT),
        "--model",
        "tiny-llama",
        "--prompt",
        "Hi",
        "--max_new_tokens",
        "2000",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stderr.readline()  # the note about the pad token: the answer is being made
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "") and "interrupted" in err and "Traceback" not in err


# --- a model that does not fit: layers in host memory and on disk

PLACES = {
    "all in memory": (["--device_map", "auto"], "device_map auto: "),
    "part on disk": (
        ["--device_map", "sequential", "--max_memory", "cpu=1MiB"],
        "device_map sequential: cpu 0.5 MiB, disk 0.9 MiB\n",
    ),
    "all on disk": (["--device_map", "auto", "--max_memory", "cpu=1KB"], "device_map auto: disk 1.4 MiB\n"),
}


@pytest.mark.parametrize("places", PLACES)
def test_a_model_that_is_offloaded_answers_the_same(capsys, expected, places):
    flags, said = PLACES[places]
    runpy.run_path(str(SCRIPT))["main"](["--model", "tiny-llama", *map(str, PROMPT), *flags])
    shown = capsys.readouterr()
    assert shown.out == expected + "\n" and said in shown.err


def test_an_adapter_is_offloaded_with_its_base(tmp_path, capsys, expected):
    flags = ["--device_map", "auto", "--max_memory", "cpu=1MiB"]
    folder = adapter(tmp_path / "adapter")
    runpy.run_path(str(SCRIPT))["main"](["--model", str(folder), *map(str, PROMPT), *flags])
    shown = capsys.readouterr()
    assert shown.out == expected + "\n" and "disk" in shown.err


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(1, 12)).logits.cpu()


def test_offloaded_weights_give_the_same_logits_bit_by_bit(tmp_path):
    model = models.resolve("tiny-llama")
    tokenizer = models.load_tokenizer(model)
    usual = {"dtype": torch.float32, "attn": "sdpa", "zero3": False}
    whole = models.load(model, tokenizer, **usual)
    on_disk = models.load(model, tokenizer, device_map="auto", max_memory={"cpu": 2**20}, **usual)
    assert {"cpu", "disk"} == set(on_disk.hf_device_map.values())
    assert any(weight.is_meta for weight in on_disk.parameters())
    assert torch.equal(logits(on_disk), logits(whole))
    # As accelerate does it beside a GPU: weights in host memory, sent layer by layer to the device, here the CPU.
    in_host = accelerate.cpu_offload(models.load(model, tokenizer, **usual), execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in in_host.parameters())
    assert torch.equal(logits(in_host), logits(whole))
    question = [{"text": "Name a colour."}]
    assert models.answers(in_host, tokenizer, question) == models.answers(whole, tokenizer, question)


def test_an_offloaded_model_whose_pad_token_is_new_answers_the_same(tmp_path):
    """Its vocabulary is not resized: weights on disk keep their shape."""
    model = models.resolve(str(model_zoo.write(tmp_path, model_zoo.gpt2())))
    tokenizer = models.load_tokenizer(model)
    usual = {"dtype": torch.float32, "attn": "sdpa", "zero3": False}
    whole = models.load(model, tokenizer, **usual)
    offloaded = models.load(model, tokenizer, device_map="auto", max_memory={"cpu": 40_000}, **usual)
    assert whole.config.vocab_size == 258 and offloaded.config.vocab_size == 257
    question = [{"text": "Name a colour."}]
    assert models.answers(offloaded, tokenizer, question) == models.answers(whole, tokenizer, question)


def test_weights_that_disk_cannot_be_read_from_ask_for_a_folder(tmp_path, capsys):
    folder = model_zoo.write(tmp_path / "model", model_zoo.llama2())
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    main = runpy.run_path(str(SCRIPT))["main"]
    words = ["--model", str(folder), *map(str, PROMPT)]
    main(words)
    answer = capsys.readouterr().out
    words += ["--device_map", "auto", "--max_memory", "cpu=40KB"]
    with pytest.raises(InputError, match=r"a part does not fit in memory(.|\n)*--offload_folder FOLDER"):
        main(words)
    main([*words, "--offload_folder", str(tmp_path / "off")])
    assert capsys.readouterr().out == answer
    assert list((tmp_path / "off").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--max_memory", "cpu=1GiB"], "--max_memory has no effect without --device_map"),
        (["--offload_folder", "off"], "--offload_folder has no effect without --device_map"),
        (["--device_map", "auto", "--max_memory", "cpu"], "'' is no size"),
        (["--device_map", "auto", "--max_memory", "cpu=lots"], "'lots' is no size"),
        (["--device_map", "auto", "--max_memory", "gpu=1GiB"], "'gpu' is no GPU's number and not cpu"),
        (["--device_map", "auto", "--max_memory", "9=1GiB"], "there is no GPU 9, this machine shows"),
        (["--device_map", "auto", "--offload_folder", __file__], "test_generate.py is a file"),
    ],
)
def test_places_that_do_not_exist_are_one_message(flags, found):
    with pytest.raises(InputError, match=re.escape(found)):
        runpy.run_path(str(SCRIPT))["main"](["--model", "tiny-llama", *map(str, PROMPT), *flags])


def test_an_unknown_device_map_ends_with_2():
    done = generate("--model", "tiny-llama", *PROMPT, "--device_map", "gpu0")
    assert done.returncode == 2 and "invalid choice: 'gpu0' (choose from" in done.stderr
