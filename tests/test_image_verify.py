"""make verify in the image: whole, as strictly as the image is promised to run; and red for faults of a container.

Each fault is what a real `docker run` gives: a flag that is missing, a limit, a mount, a firewall.
"""

import json
import subprocess
import time
import uuid

import image_engine
import pytest
from containers import IMAGE, ROOT, STRICT, docker, inside

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]
PACKAGES = "/opt/venv/lib/python3.13/site-packages"
CPU_SECONDS = 120  # what 60 s on two cores have; wall clock would measure what else this machine does
GPU_CHECKS = ("xformers", "flash-attn", "fused-adam")


@pytest.fixture(scope="module")
def whole() -> tuple[dict, float]:
    """(document, CPU seconds) of a whole run: no user that it knows, nothing writable, no network."""
    line = "TIMEFORMAT='%U %S'; time make -s verify JSON=1"
    done = inside("bash", "-c", line, flags=(*STRICT, "--shm-size", "2g"), timeout=500)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return json.loads(done.stdout), sum(map(float, done.stderr.splitlines()[-1].split()))


def test_all_cpu_checks_pass_and_gpu_checks_are_skipped_with_a_reason(whole):
    checks = whole[0]["checks"]
    assert len(checks) > 30 and whole[0]["failed"] == 0
    for check in checks:
        on_gpu = check["name"].startswith("gpu-") or check["name"] in GPU_CHECKS
        assert check["state"] == ("skipped" if on_gpu else "passed"), check
        assert not on_gpu or "GPU" in check["fact"] or "card" in check["fact"], check


def test_it_needs_less_than_a_minute_of_two_cores(whole):
    assert 10 < whole[1] < CPU_SECONDS


def test_prebuilt_ops_are_used_and_nothing_is_compiled(whole):
    ops = next(check for check in whole[0]["checks"] if check["name"] == "ops")
    assert "prebuilt" in ops["fact"], ops


def red(check: str, *flags: str, finding: str = "", words: tuple[str, ...]) -> None:
    """The check in a container with `flags` fails by `finding`, with `words` in its fact or its fix."""
    done = inside("make", "-s", "verify", "JSON=1", f"ONLY={check}", flags=("--network", "none", *flags))
    judge(done, finding or check, words)


def judge(done: subprocess.CompletedProcess, finding: str, words: tuple[str, ...]) -> None:
    assert done.returncode == 2, done.stdout + done.stderr  # make's own code for any that is not 0
    [row] = json.loads(done.stdout)["checks"]
    assert (row["state"], row["finding"]) == ("failed", finding), row
    for word in words:
        assert word in row["fact"] + "\n" + row["fix"], (word, row)


def test_the_64_mb_of_shm_that_docker_gives_are_too_few():
    red("shm", words=("0.06 GiB free of 0.06", "docker run --shm-size=16g"))


def test_a_low_memlock_is_named():
    red("memlock", "--ulimit", "memlock=65536", words=("0.06 MiB may be locked", "docker run --ulimit memlock=-1"))


def test_few_open_files_are_named():
    red("open-files", "--ulimit", "nofile=256:256", words=("256 open files", "--ulimit nofile=65536:65536"))


def test_little_memory_is_named():
    red("ram", "--memory", "2g", words=("2.0 GiB (at least 6)", "docker run --memory"))


def test_a_cache_that_is_mounted_read_only_is_named(tmp_path):
    tmp_path.chmod(0o777)
    words = ("HF_HOME: /cache/huggingface (Read-only file system)", "set HF_HOME to folders", "docker run -v")
    red("caches", "--volume", f"{tmp_path}:/cache/huggingface:ro", words=words)


def test_a_volume_without_room_is_named():
    flags = ("--mount", "type=tmpfs,destination=/cache,tmpfs-size=50m,tmpfs-mode=1777")
    red("disk", *flags, words=("/cache/slipway: 0.0 GiB free of 2.0 needed", "SLIPWAY_CACHE="))


def test_a_uid_that_nothing_names_is_named():
    flags = ("--user", "12345:0", "--env", "USER=", "--env", "LOGNAME=")
    red("user", *flags, words=("UID 12345 has no line in /etc/passwd", "docker run -e USER=me"))


@pytest.fixture
def broken(tmp_path):
    """A file to mount over a library: not an ELF file, and of another size."""
    file = tmp_path / "broken.so"
    file.write_bytes(b"\0" * 4096)
    return file


@pytest.mark.parametrize(
    ("check", "words"),
    [("files", ("xformers/_C.so has 4096 bytes of",)), ("imports", ("_C.so: ", "invalid ELF header"))],
)
def test_a_library_that_is_broken_is_named(check, words, broken):
    red(check, "--volume", f"{broken}:{PACKAGES}/xformers/_C.so:ro", words=(*words, "image"))


def test_an_op_that_is_missing_is_named():
    """As root in a container whose root can be written: the op is deleted, and RECORD knows of it."""
    line = f"rm {PACKAGES}/deepspeed/ops/adam/cpu_adam_op*.so; exec make -s verify JSON=1 ONLY=files"
    done = inside("bash", "-c", line, flags=("--user", "0:0", "--network", "none"))
    judge(done, "files", ("deepspeed/ops/adam/cpu_adam_op", "is missing", "build the image again"))


def test_a_wrong_version_is_named():
    line = f"sed -i 's/^Version: .*/Version: 1.2.3/' {PACKAGES}/rich-*.dist-info/METADATA"
    words = ("rich is 1.2.3, pinned ", "build the image again")
    done = inside(
        "bash", "-c", f"{line}; exec make -s verify JSON=1 ONLY=pins", flags=("--user", "0:0", "--network", "none")
    )
    judge(done, "pins", words)


def test_a_typo_in_a_mounted_config_is_named(tmp_path):
    config = tmp_path / "zero2.json"
    config.write_text((ROOT / "ds_configs/zero2.json").read_text().replace("zero_optimization", "zero_optimisation"))
    red(
        "ds-configs",
        *("--volume", f"{config}:/slipway/ds_configs/zero2.json:ro"),
        words=("zero2.json", "did you mean"),
    )


def can_enter() -> bool:
    return subprocess.run(["nsenter", "--net=/proc/self/ns/net", "iptables", "-L"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_enter(), reason="no right to set a firewall in a container (nsenter, iptables)")
def test_a_firewall_between_the_ranks_is_named():
    """gloo talks at the container's own address, which a firewall closes here; 127.0.0.1 stays open."""
    name, engine = f"slipway-firewall-{uuid.uuid4().hex[:8]}", image_engine.client()
    docker("run", "--detach", "--name", name, "--shm-size", "2g", IMAGE, "sleep", "600")
    try:
        text = "{{.State.Pid}} {{.NetworkSettings.IPAddress}}"
        pid, address = docker("inspect", "--format", text, name).stdout.split()
        rule = ["iptables", "-A", "INPUT", "-d", address, "-p", "tcp", "-j", "DROP"]
        subprocess.run(["nsenter", "--target", pid, "--net", *rule], check=True)
        start = time.monotonic()
        done = docker("exec", name, "make", "-s", "verify", "JSON=1", "ONLY=all-reduce")
        assert time.monotonic() - start < 200
        judge(done, "all-reduce", ("no result within 30 s", "GLOO_SOCKET_IFNAME=lo"))
        left = subprocess.check_output([engine, "exec", name, "ps", "-A", "-o", "comm="], text=True)
        assert "python" not in left, left
    finally:
        docker("rm", "--force", name)
