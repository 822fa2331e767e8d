"""What the launcher and each rank decide from the hardware, with the hardware's answers replayed."""

import pytest
import torch

from slipway import topology
from slipway.errors import InputError

GPUS = topology.World(4, 4, "cuda", 4)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(4) is a machine with four."""
    return lambda count: monkeypatch.setattr(topology, "_count_gpus", lambda: count)


@pytest.fixture
def card(monkeypatch):
    """card("Tesla T4", (7, 5)) is what the first GPU says it is."""

    def answer(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    return answer


def test_a_rank_for_each_gpu_and_no_more(gpus):
    gpus(4)
    assert topology.plan(None) == GPUS
    assert topology.plan(2).size == 2
    with pytest.raises(InputError, match=r"NPROC=8, but this machine shows 4 GPU"):
        topology.plan(8)


def test_without_a_gpu_two_ranks_or_as_many_as_asked(gpus):
    gpus(0)
    assert (topology.plan(None).size, topology.plan(3).size, topology.plan(None).accelerator) == (2, 3, "cpu")


def test_several_gpus_are_not_left_idle_by_a_script_without_a_launcher(gpus, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    gpus(8)
    with pytest.raises(InputError, match=r"started without a launcher: one process on a machine with 8 GPUs"):
        topology.current()


@pytest.mark.parametrize(
    ("name", "capability", "precision"),
    [("Tesla T4", (7, 5), "fp16"), ("NVIDIA H100 80GB HBM3", (9, 0), "bf16"), ("NVIDIA A10G", (8, 6), "bf16")],
)
def test_precision_follows_the_card(card, name, capability, precision):
    card(name, capability)
    assert topology.precision(GPUS, None, None, "zero3.yaml") == precision
    assert topology.precision(GPUS, None, True, "command line") == "fp16"
    assert topology.precision(GPUS, False, False, "command line") == "fp32"


def test_bf16_on_a_card_without_it_names_card_and_flag(card):
    card("Tesla T4", (7, 5))
    with pytest.raises(InputError, match=r"command line: bf16 was asked, but Tesla T4 has none\n.*--fp16 true"):
        topology.precision(GPUS, True, None, "command line")
