"""Bad input ends the real BERT command with one message, what to do, exit code 2, and an untouched OUTPUT."""

import concurrent.futures

import pytest
from harness import assert_kept, assert_refused, launch_bert, selected, write_files
from small_bert import write_model
from test_bad_input import lines

from slipway import manifest

GOOD = "text,label\nthe sea,a\nthe land,b\nthe sky,a\nthe wood,b\n"
# name: (files to write, flags, words of the message). {d} is the folder of the files, {r} an earlier run's.
CASES = {
    "unknown flag": ({}, ["--learning_rat", "1"], ["--learning_rat", 'did you mean "--learning_rate"']),
    "wrong type": ({}, ["--seed", "red"], ["--seed", "red"]),
    "no batch": ({}, ["--per_device_train_batch_size", "0"], ["--per_device_train_batch_size 0", "at least 1"]),
    "a rate that is none": ({}, ["--learning_rate", "nan"], ["--learning_rate nan", "a number is needed"]),
    "a rate below nothing": ({}, ["--learning_rate", "-1"], ["--learning_rate -1.0", "more than 0"]),
    "saves at no step": ({}, ["--save_steps", "-1"], ["--save_steps -1", "at least 0"]),
    "dropout of all": ({}, ["--dropout", "1.5"], ["--dropout 1.5", "0 to 1"]),
    "unknown compiler": ({}, ["--torch_compile_backend", "inducter"], ["inducter", 'did you mean "inductor"']),
    "no text column": (
        {"a.csv": "texts,label\nx,a\ny,b\n"},
        ["--data", "{d}/a.csv"],
        ["a.csv:2: no column 'text'", 'did you mean "texts"', "--text_column"],
    ),
    "no label column": ({"a.jsonl": lines({"text": "x"})}, ["--data", "{d}/a.jsonl"], ["a.jsonl:1: no column 'label'"]),
    "empty file": ({"a.csv": ""}, ["--data", "{d}/a.csv"], ["a.csv is empty"]),
    "header alone": ({"a.csv": "text,label\n"}, ["--data", "{d}/a.csv"], ["a.csv is empty"]),
    "no such file": ({"texts.csv": GOOD}, ["--data", "{d}/text.csv"], ["text.csv: no such file", "texts.csv"]),
    "one class": ({"a.csv": "text,label\nx,a\ny,a\n"}, ["--data", "{d}/a.csv"], ["all 2 rows have the label 'a'"]),
    "one text": (
        {"a.csv": "text,label\nx,a\nx,b\nx,a\n"},
        ["--data", "{d}/a.csv"],
        ["a.csv: all 3 rows have the same text, 'x'", "--text_column"],
    ),
    "label is null": (
        {"a.jsonl": lines({"text": "x", "label": "a"}, {"text": "y", "label": None})},
        ["--data", "{d}/a.jsonl"],
        ["a.jsonl:2: label is null, which is no class"],
    ),
    "label is NaN": (
        {"a.jsonl": '{"text": "x", "label": 1}\n{"text": "y", "label": NaN}\n'},
        ["--data", "{d}/a.jsonl"],
        ["a.jsonl:2: label is NaN, which is no class"],
    ),
    "label is empty": ({"a.csv": "text,label\nx,a\ny,\n"}, ["--data", "{d}/a.csv"], ["a.csv:3: label is empty"]),
    "label is a fraction": (
        {"a.jsonl": lines({"text": "x", "label": 1.5})},
        ["--data", "{d}/a.jsonl"],
        ["a.jsonl:1: label is 1.5, which is no class", "regression"],
    ),
    "labels are a scale": (
        {"a.csv": "text,label\nx,0.25\ny,1\nz,0.75\n"},
        ["--data", "{d}/a.csv"],
        ["numbers on a scale, such as 0.25"],
    ),
    "too many classes": (
        {"a.csv": "text,label\n" + "".join(f"text {i},{i}\n" for i in range(30))},
        ["--data", "{d}/a.csv"],
        ["30 different values of label in 30 rows are no classes", "--label_column"],
    ),
    "text is a number": ({"a.jsonl": lines({"text": 7, "label": "a"})}, ["--data", "{d}/a.jsonl"], ["no text but 7"]),
    "class that is not trained": (
        {"a.csv": GOOD, "b.csv": "text,label\nx,c\n"},
        ["--data", "{d}/a.csv", "--eval_data", "{d}/b.csv"],
        ["b.csv:2: class 'c' is not in", "a.csv"],
    ),
    "OUTPUT holds something else": (
        {"out/thesis.tex": "years of work"},
        ["--output_dir", "{d}/out"],
        ["/out is not empty and holds no run", "nothing was changed"],
    ),
    "OUTPUT is below a file": ({"out": "x"}, ["--output_dir", "{d}/out/run"], ["/out is a file"]),
    "OUTPUT cannot be written": ({}, ["--output_dir", "/proc/run"], ["/proc cannot be written"]),
    "OUTPUT holds a run": ({}, ["--output_dir", "{r}"], ["holds an unfinished run", "--resume auto"]),
    "resume of another run": (
        {},
        ["--resume", "{r}", "--seed", "1"],
        ["checkpoint-2 is of another run", "seed: 42 there, 1 now"],
    ),
    "resume from nowhere": ({}, ["--resume", "{d}/none"], ["--resume {d}/none: no such folder"]),
    "resume from an incomplete checkpoint": (
        {"out/checkpoint-4/model.safetensors": "x"},
        ["--resume", "{d}/out/checkpoint-4"],
        ["checkpoint-4 is no complete checkpoint: it has no manifest"],
    ),
    "model is a decoder": ({}, ["--model", "tiny-llama"], ["tiny-llama is no encoder: it is a decoder", "BERT"]),
    "model is missing": ({}, ["--model", "{d}/none/bert"], ["none/bert does not exist"]),
    "model is no model": ({"m/notes.txt": "x"}, ["--model", "{d}/m"], ["no config.json; found: notes.txt"]),
    "model is a file": ({"m.gguf": "x"}, ["--model", "{d}/m.gguf"], ["is a single file"]),
    "model is not said": ({"a.csv": GOOD}, ["NO MODEL", "--data", "{d}/a.csv"], ["needs a MODEL", "MODEL=minilm"]),
    "data is no path": ({}, ["--data", "imdb"], ["DATA=imdb is no file or folder", "docstrings"]),
    "longer than the model": ({"a.csv": GOOD}, ["--data", "{d}/a.csv", "--max_length", "512"], ["takes 128 tokens"]),
    "fp16 on a CPU": ({}, ["--mixed_precision", "fp16"], ["fp16 training needs a GPU"]),
    "unknown precision": ({}, ["--mixed_precision", "bf61"], ['did you mean "bf16"']),
    "wandb is not installed": ({}, ["--report_to", "wandb"], ["wandb is not installed", "--report_to tensorboard"]),
}
REAL = "unknown flag"  # the case that is started by a python of its own


def start(name, folder, model, earlier):
    files, flags = CASES[name][0], [*CASES[name][1]]
    write_files(folder, files)
    usual = {"--model": model, "--output_dir": folder / "output"}
    if flags[0] == "NO MODEL":
        del usual["--model"], flags[0]
    words = [flag.replace("{d}", str(folder)).replace("{r}", str(earlier)) for flag in flags]
    words += [word for flag, value in usual.items() if flag not in flags for word in (flag, value)]
    return launch_bert(*words, forked=name != REAL, timeout=200)


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """The selected cases, started two at a time: most of a start is importing."""
    top = tmp_path_factory.mktemp("bad")
    model, earlier = write_model(top / "model"), top / "earlier"
    (earlier / "checkpoint-2").mkdir(parents=True)
    (earlier / "run.json").write_text('{"status": "started"}')
    manifest.seal(earlier / "checkpoint-2", {"run": {"seed": 42}}, {})  # a complete one, as far as files tell
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {
            name: (top / str(i), pool.submit(start, name, top / str(i), model, earlier))
            for i, name in enumerate(selected(CASES, request))
        }
        yield futures


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message(name, results):
    folder, future = results[name]
    assert_refused(future.result(), [word.replace("{d}", str(folder)) for word in CASES[name][2]])
    assert not (folder / "output").exists()
    assert_kept(folder, CASES[name][0])
