"""What cannot be exported is refused in one message, and leaves nothing behind."""

import os
import shutil

import export as script
import pytest
import torch
from exports import assert_same, exported, foreign, make
from safetensors.torch import load_file, save_file

from slipway import export, manifest
from slipway.errors import InputError

pytestmark = pytest.mark.timeout(600)  # a recipe is trained where no other test has done so


def refused(match, *words):
    with pytest.raises(InputError, match=match) as caught:
        script.main([str(word) for word in words])
    assert caught.value.fix
    return caught.value


BAD_FLAGS = {
    "--dtype fp8": r"--dtype fp8.*",
    "--dtype bf61": r"--dtype bf61, did you mean \"bf16\"\?",
    "--shard_size 5": "--shard_size 5 is no size",
    "--shard_size=-5GB": "--shard_size -5GB is no size",
    "--shard_size 0MB": "--shard_size 0MB is no size",
    "--merge": "--merge: .* is no adapter but a whole model",
    "--config_from {tmp}/none": "--config_from .* is no folder",
    "--config_from {tmp}": "holds no config.json",
    "": "holds no config.json, so nothing says what the weights are of",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_flag_that_cannot_be_followed_is_refused(flags, other, tmp_path):
    words = flags.replace("{tmp}", str(tmp_path)).split()
    refused(BAD_FLAGS[flags], "--checkpoint", other / "zero1", "--output", tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_none_are_named(other, tmp_path):
    out = ["--output", tmp_path / "out"]
    refused("--checkpoint is missing", *out)
    refused("--output is missing", "--checkpoint", other / "zero1")
    error = refused("zero9: no such folder", "--checkpoint", other / "zero9", *out)
    assert str(other / "zero1") in error.fix
    refused("is a file", "--checkpoint", other / "zero1.safetensors", *out)
    refused("is no checkpoint: it holds no weights .*found: config.json", "--checkpoint", other / "config", *out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    refused("full is not empty", "--checkpoint", other / "zero1", "--output", tmp_path / "full")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine"]


def _cut(file):
    file.write_bytes(file.read_bytes()[:-200])


RANK1 = "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
BROKEN = {
    "rank 1 missing": (
        "zero1", lambda folder: (folder / RANK1).unlink(),
        "1 of 2 ranks' files are missing: zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "a frozen part missing": (
        "zero3_groups", lambda folder: (folder / RANK1.replace("optim", "model")).unlink(),
        "1 of 2 ranks' files are missing: zero_pp_rank_1_mp_rank_00_model_states.pt",
    ),
    "model file missing": (
        "zero2_bf16", lambda folder: (folder / "global_step2/mp_rank_00_model_states.pt").unlink(),
        r"holds no \*_model_states.pt",
    ),
    "cut": ("zero1", lambda folder: _cut(folder / RANK1), "is broken or cut short"),
    "empty": ("zero1", lambda folder: (folder / RANK1).write_bytes(b""), "is broken or cut short"),
    "of two saves": (
        "zero3_groups", lambda folder: shutil.copyfile(folder.parent / "zero1" / RANK1, folder / RANK1),
        "the ranks' files are not of one save",
    ),
    "latest": ("zero1", lambda folder: (folder / "latest").write_text("global_step9"), "latest. names 'global_step9'"),
    "tensor parallel": (
        "zero1", lambda folder: (folder / "global_step2/mp_rank_01_model_states.pt").touch(), "tensor or pipeline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_an_incomplete_checkpoint_is_refused_and_the_reason_named(what, other, tmp_path):
    case, damage, match = BROKEN[what]
    shutil.copytree(other / "zero1", tmp_path / "zero1")
    shutil.copytree(other / case, tmp_path / case, dirs_exist_ok=True)
    damage(tmp_path / case)
    words = ["--output", tmp_path / "out", "--config_from", other / "config"]
    refused(match, "--checkpoint", tmp_path / case, *words)
    assert not list(tmp_path.glob("out*"))


def test_a_config_of_another_model_is_refused(other, tmp_path):
    words = ["--config_from", other / "large_config", "--output", tmp_path / "out"]
    refused("tensors are missing", "--checkpoint", other / "zero1", *words)
    assert not list(tmp_path.iterdir())


def test_a_runs_checkpoint_needs_its_manifest_and_every_byte_of_it(trained, tmp_path):
    folder, _ = trained("zero3")
    shutil.copytree(folder, tmp_path / "run")
    checkpoint, out = tmp_path / "run/checkpoint-20", ["--output", tmp_path / "out"]
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    refused("model.safetensors is not what was saved: its checksum differs", "--checkpoint", checkpoint, *out)
    _cut(weights)
    refused(r"is no complete checkpoint: model.safetensors has [\d,]+ bytes", "--checkpoint", checkpoint, *out)
    (checkpoint / manifest.MANIFEST).unlink()
    refused("is no complete checkpoint: it has no manifest", "--checkpoint", checkpoint, *out)


def test_hollow_safetensors_are_passed_over_or_refused(trained, tmp_path, capsys):
    """What save_pretrained leaves under ZeRO-3 when nothing is gathered."""
    folder, _ = trained("zero3")
    want = load_file(folder / "model.safetensors")
    checkpoint = foreign(folder, tmp_path)
    hollow = {name: tensor if tensor.dim() == 1 else torch.empty(0) for name, tensor in want.items()}
    save_file(hollow, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert_same(make(checkpoint, tmp_path / "out"), want)
    assert "16 tensors in its safetensors are empty: read from DeepSpeed's files" in capsys.readouterr().err
    shutil.rmtree(checkpoint / "global_step20")
    (checkpoint / "latest").unlink()
    refused("16 of 21 tensors are empty", "--checkpoint", checkpoint, "--output", tmp_path / "no")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return (os.makedirs, (str(self.folder), 0o777, True))


def test_a_pickle_runs_nothing_unless_it_is_trusted(other, tmp_path):
    shutil.copytree(other / "zero0", tmp_path / "zero0")
    file = tmp_path / "zero0/global_step2/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save(content | {"more": Evil(tmp_path / "ran")}, file)
    words = ["--checkpoint", tmp_path / "zero0", "--output", tmp_path / "out", "--config_from", other / "config"]
    error = refused("holds more than weights .*makedirs.*can run any program", *words)
    assert "--trust_pickle" in error.fix and not (tmp_path / "ran").exists()
    script.main([*map(str, words), "--trust_pickle"])
    assert (tmp_path / "ran").exists()


def test_a_full_disk_is_seen_before_anything_is_written(other, tmp_path, monkeypatch):
    monkeypatch.setattr(export.memory, "free_disk", lambda _: 1000)
    words = ["--checkpoint", other / "zero1", "--output", tmp_path / "out", "--config_from", other / "config"]
    refused("no room in .*the export takes 0.000 GiB, 0.000 are free", *words)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_message_and_code_2(other, tmp_path):
    done = exported(other, "zero1", tmp_path / "out", "--dtype", "half")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: --dtype half\n  fix: one of auto, fp32, bf16, fp16\n"
