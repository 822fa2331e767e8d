"""However the BERT recipe is started, it does the same; and fewer ranks than were asked for are an error."""

import concurrent.futures
import socket
import sys
from pathlib import Path

import pytest
from harness import ROOT, TRAIN, record, run, run_python, torchrun
from small_bert import write_model, write_texts

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
ONE_MACHINE = TRAIN.parent / "one_machine.yaml"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(folder, flags without --output_dir): 14 steps an epoch of a small model, with dropout."""
    top = tmp_path_factory.mktemp("launch")
    write_model(top / "model")
    write_texts(top / "texts.csv", 120)
    flags = ["--model", top / "model", "--data", top / "texts.csv", "--per_device_train_batch_size", 4]
    return top, [*flags, "--num_train_epochs", 1, "--learning_rate", 1e-3, "--logging_steps", 1]


def by_make(top: Path, flags: list, ranks: int):
    words = [f"NPROC={ranks}", f"MODEL={flags[1]}", f"DATA={flags[3]}", f"OUTPUT={top / f'make-{ranks}'}"]
    more = " ".join(map(str, flags[4:]))
    return run("make", "train-bert", *words, f"ARGS={more}", SLIPWAY_PYTHON=sys.executable)


@pytest.fixture(scope="module")
def made(job):
    """made(ranks) -> the folder of a run that make started."""
    top, flags = job
    done = {}

    def once(ranks):
        if ranks not in done:
            done[ranks] = by_make(top, flags, ranks)
        assert done[ranks].returncode == 0, done[ranks].stderr[-3000:]
        return top / f"make-{ranks}"

    return once


def same(run_folder: Path, other: Path):
    assert record(run_folder)["losses"] == record(other)["losses"]
    assert (run_folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert record(run_folder)["status"] == "finished"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_says_how_many_ranks_it_got(ranks, made):
    got = record(made(ranks))["got"]
    assert got["world_size"] == ranks
    assert got["engine"] == "DistributedDataParallel"  # of one rank too: torchrun has made a group of it
    assert len(record(made(ranks))["cost"]["peak_gib_per_rank"]) == ranks


def test_accelerate_launch_with_the_config_file_does_what_make_does(job, made, tmp_path):
    more = ["--config_file", ONE_MACHINE, "--num_processes", 2, "--mixed_precision", "no"]
    done = run(*ACCELERATE, *more, TRAIN, *job[1], "--output_dir", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 x CPU, DistributedDataParallel over gloo" in done.stdout
    same(tmp_path / "run", made(2))


def test_accelerate_launch_without_a_config_file_does_what_make_does(job, made, tmp_path):
    done = run(*ACCELERATE, TRAIN, *job[1], cwd=tmp_path, HF_HOME=str(tmp_path / "none"))  # no default config either
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 x CPU, one process" in done.stdout
    other, content = record(made(1)), record(tmp_path / "outputs" / "bert")
    assert content["got"]["engine"] == "BertForSequenceClassification"
    # Not to the last bit: accelerate gives a process on a CPU one thread, make all there are.
    assert [row["loss"] for row in content["losses"]] == pytest.approx(
        [row["loss"] for row in other["losses"]], rel=1e-5
    )


def test_two_machines_with_the_config_file_do_what_one_does(job, made, tmp_path):
    """Two launchers, as on two machines, that meet at an address; a rank each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        where = ["--main_process_ip", "127.0.0.1", "--main_process_port", found.getsockname()[1]]
    more = ["--config_file", TRAIN.parent / "many_machines.yaml", "--num_processes", 2, "--mixed_precision", "no"]

    def machine(rank: int):
        words = [*more, *where, "--machine_rank", rank, TRAIN, *job[1], "--output_dir", tmp_path / "run"]
        return run(*ACCELERATE, *words, cwd=tmp_path)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in pool.map(machine, (0, 1)):
            assert done.returncode == 0, done.stderr[-3000:]
    assert record(tmp_path / "run")["got"]["world_size"] == 2
    same(tmp_path / "run", made(2))


def test_torchrun_does_what_make_does(job, made, tmp_path):
    done = torchrun(TRAIN, *job[1], "--output_dir", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    same(tmp_path / "run", made(2))


def test_one_process_where_the_command_line_asks_for_two_is_an_error(job, tmp_path):
    done = run(*ACCELERATE, "--cpu", "--num_processes", 2, TRAIN, *job[1], "--output_dir", tmp_path / "run")
    assert done.returncode != 0
    assert "2 ranks were asked for (accelerate launch --num_processes), 1 started" in done.stderr
    assert not (tmp_path / "run").exists()


def test_one_process_where_the_config_file_asks_for_eight_is_an_error(job, tmp_path):
    config = tmp_path / "cpu.yaml"
    config.write_text(ONE_MACHINE.read_text().replace("MULTI_GPU", "NO").replace("bf16", "'no'") + "use_cpu: true\n")
    done = run(*ACCELERATE, "--config_file", config, TRAIN, *job[1], "--output_dir", tmp_path / "run")
    assert done.returncode != 0
    assert f"8 ranks were asked for (num_processes in {config}), 1 started" in done.stderr


def test_one_process_where_our_launcher_asked_for_two_is_an_error(job, tmp_path):
    done = run_python(TRAIN, *job[1], "--output_dir", tmp_path / "run", SLIPWAY_WORLD_SIZE="2")
    assert done.returncode == 2
    assert "2 ranks were asked for (scripts/launch.py), 1 started" in done.stderr


def test_the_configs_for_many_machines_name_what_accelerate_knows():
    """accelerate itself reads them: an unknown key would be refused."""
    from accelerate.commands.config.config_args import load_config_from_file

    found = sorted(TRAIN.parent.glob("*.yaml"))
    assert [file.stem for file in found] == ["many_machines", "one_machine"]
    for file in found:
        config = load_config_from_file(str(file))
        assert config.num_processes == 8 * config.num_machines
        assert f"accelerate launch --config_file {file.relative_to(ROOT)}" in file.read_text()
