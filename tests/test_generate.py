"""scripts/generate.py as a user starts it: answers on stdout, messages on stderr, and its exit codes."""

import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, run
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from slipway import embedded, models

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
