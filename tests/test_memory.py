"""Room on disks and in memory is estimated before a run starts."""

import re

import pytest
from harness import ROOT, launch

from slipway import memory
from slipway.errors import InputError

SEVEN_B = memory.Size(parameters=7_000_000_000, trainable=7_000_000_000, weight_bytes=2)


def test_a_disk_too_small_for_the_checkpoints_is_said_before_the_launch(small_disk):
    disk = small_disk(1)
    done = launch("--model_name_or_path", "tiny-llama", "--max_rows", 400, "--output_dir", disk / "run")
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"no room in {disk}/run: the run needs about" in done.stderr
    assert "--save_total_limit 1" in done.stderr
    assert not list(disk.iterdir())


def test_a_checkpoint_of_adam_in_mixed_precision_is_16_bytes_a_parameter():
    assert SEVEN_B.checkpoint == 16 * 7_000_000_000


def test_the_page_of_big_models_has_the_figures_of_the_memory_model():
    page = (ROOT / "docs" / "big-models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) B \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        billions, *gib = map(int, row)
        size = memory.Size(billions * 10**9, billions * 10**9, weight_bytes=2)
        train = 2 * size.model + size.optimizer  # weights and gradients, and what Adam keeps
        host = memory.host_need(size, offload_optimizer=True, offload_param=True, local_share=1)
        assert gib == [round(need / memory.GIB) for need in (size.model, train, train / 8, host)]


def test_nvme_offload_wants_a_folder_with_room(tmp_path):
    need = memory.nvme_need(SEVEN_B, ["offload_optimizer", "offload_param"], local_share=0.5)
    assert need == 7_000_000_000 * (16 + 2) // 2
    memory.check_nvme(tmp_path, 1)
    with pytest.raises(InputError, match="does not exist"):
        memory.check_nvme(tmp_path / "none", 1)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        memory.check_nvme(tmp_path / "file", 1)
    with pytest.raises(InputError, match=r"needs about 1024.0 GiB, .* are free\n.*larger disk"):
        memory.check_nvme(tmp_path, memory.free_disk(tmp_path) and 2**40)
    with pytest.raises(InputError, match="host memory"):
        memory.check_host(2**50)
