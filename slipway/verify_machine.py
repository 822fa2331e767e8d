"""`make verify`: what the machine or the container gives to a run: memory, disk, limits, folders, names, network."""

import getpass
import os
import resource
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

from slipway.verify import Finding, check, failed, passed

GIB, MIB = 2**30, 2**20
SHM_NEEDS = 1 * GIB  # NCCL takes tens of MiB for each pair of ranks; Docker gives 64 MiB to all
FILES_NEED = 4096  # a rank of a large run opens shards, sockets and workers' pipes; 1024 is what a login shell gives
MEMLOCK_NEEDS = 1 * MIB  # 64 KiB was the kernel's default up to 5.15: too little for a single pinned buffer
RAM_NEEDS = 6 * GIB  # two ranks of the default recipe
CACHE_NEEDS = 2 * GIB  # SmolLM2 as safetensors, prepared data, compiled ops
INFINIBAND = Path("/sys/class/infiniband")


@check(
    "shm",
    "/dev/shm has room for what ranks of one machine hand each other",
    fix="docker run --shm-size=16g (Compose: shm_size: 16g; Kubernetes: an emptyDir with medium: Memory at /dev/shm), "
    "or --ipc=host",
    limit_s=10,
)
def check_shm() -> Finding:
    total, _, free = shutil.disk_usage("/dev/shm")
    said = passed if free >= SHM_NEEDS else failed
    return said(
        "/dev/shm: {free_gib:.2f} GiB free of {total_gib:.2f} (at least {need_gib:.0f})",
        free_gib=free / GIB,
        total_gib=total / GIB,
        need_gib=SHM_NEEDS / GIB,
    )


@check(
    "memlock",
    "memory may be locked, as InfiniBand and NVMe offload do",
    fix="docker run --ulimit memlock=-1 (Compose: ulimits; on a host: `ulimit -l unlimited`, limits.conf, or "
    "LimitMEMLOCK=infinity in the service)",
    limit_s=10,
)
def check_memlock() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    adapters = sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if limit == resource.RLIM_INFINITY:
        return passed("unlimited")
    figures = {"mib": limit / MIB, "adapters": adapters}
    if adapters:  # RDMA pins whole buffers, and NCCL fails in ibv_reg_mr or ibv_create_cq
        return failed(
            "{mib:.2f} MiB may be locked, and there is InfiniBand: {names}", names=", ".join(adapters), **figures
        )
    if limit < MEMLOCK_NEEDS:
        return failed("{mib:.2f} MiB may be locked (at least {need:.0f})", need=MEMLOCK_NEEDS / MIB, **figures)
    return passed("{mib:.0f} MiB: enough without InfiniBand; zero3_nvme wants unlimited", **figures)


@check(
    "open-files",
    "a process may open enough files",
    fix="docker run --ulimit nofile=65536:65536, or `ulimit -n 65536` before the run",
    limit_s=10,
)
def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES_NEED
    text = "{soft} open files (at least {need}; could be raised to {hard})"
    return (passed if enough else failed)(text, soft=soft, hard=hard, need=FILES_NEED)


@check(
    "disk",
    "the caches and OUTPUT have room for the default recipe",
    fix="make room there, or name folders that have some: SLIPWAY_CACHE=, OUTPUT=, TMPDIR=",
    limit_s=20,
)
def check_disk() -> Finding:
    from slipway import cache, memory

    smollm2 = memory.Size(135_000_000, 135_000_000, 4)
    output = Path(os.environ.get("SLIPWAY_OUTPUT") or "outputs").absolute()
    needs = {
        cache.root(): CACHE_NEEDS,
        output: 3 * smollm2.checkpoint + smollm2.model,
        Path(tempfile.gettempdir()): GIB,
    }
    rooms = [
        {"folder": str(folder), "free_gib": memory.free_disk(folder) / GIB, "need_gib": need / GIB}
        for folder, need in needs.items()
    ]
    short = [room for room in rooms if room["free_gib"] < room["need_gib"]]
    lines = ["{folder}: {free_gib:.1f} GiB free of {need_gib:.1f} needed".format(**room) for room in short]
    if short:
        return failed("{text}", text="; ".join(lines), rooms=rooms)
    least = min(rooms, key=lambda room: room["free_gib"])
    return passed("at least {free_gib:.1f} GiB free for caches, OUTPUT and TMPDIR", rooms=rooms, **least)


@check(
    "ram",
    "host memory holds two ranks of the default recipe",
    fix="give the container more memory (docker run --memory), or take NPROC=1 and MODEL=tiny-llama",
    limit_s=10,
)
def check_ram() -> Finding:
    from slipway import memory

    total = memory.host_total()
    per_parameter = memory.host_need(memory.Size(1_000_000, 1_000_000, 2), True, True, 1.0) / 1e6
    figures = {"gib": total / GIB, "need_gib": RAM_NEEDS / GIB, "offload_billions": total / per_parameter / 1e9}
    if total < RAM_NEEDS:
        return failed("{gib:.1f} GiB (at least {need_gib:.0f})", **figures)
    return passed("{gib:.1f} GiB: zero3_offload fits models of up to {offload_billions:.1f} B parameters", **figures)


@check(
    "cpu",
    "this CPU has the instructions that DeepSpeed's prebuilt ops use",
    fix="run on a CPU with AVX2 (any x86-64-v3); a virtual machine must pass its host's CPU model through",
    limit_s=20,
)
def check_cpu() -> Finding:
    import platform

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = next((line.split(":")[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    missing = sorted({"avx2", "fma", "f16c", "bmi2"} - set(flags))
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "no avx")
    if platform.machine() != "x86_64" or missing:
        return failed("{kind} without {text}", kind=platform.machine(), text=", ".join(missing), missing=missing)
    return passed("{cores} cores, {widest}", cores=os.cpu_count(), widest=widest)


CACHES = {
    "HF_HOME": "~/.cache/huggingface",
    "TRITON_CACHE_DIR": "~/.triton",
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "SLIPWAY_CACHE": "~/.cache/slipway",
    "TMPDIR": tempfile.gettempdir(),
}


@check(
    "caches",
    "the folders that libraries keep things in can be written",
    fix="set {variables} to folders that user {uid} can write, or mount writable ones there (docker run -v, --tmpfs)",
    limit_s=20,
)
def check_caches() -> Finding:
    refused = {}
    for variable, usual in CACHES.items():
        folder = Path(os.environ.get(variable) or usual).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            refused[variable] = f"{folder} ({error.strerror})"
    if refused:
        text = "; ".join(f"{variable}: {why}" for variable, why in refused.items())
        variables = ", ".join(refused)
        return failed("{text}", text=text, refused=refused, variables=variables, uid=os.getuid())
    return passed("all {count} can be written by user {uid}", count=len(CACHES), uid=os.getuid())


@check(
    "user",
    "the user has a name and a home: torch's compiler asks for both",
    fix="docker run -e USER=me -e HOME=/tmp, or give the UID a line in /etc/passwd",
    limit_s=10,
)
def check_user() -> Finding:
    home, uid = Path("~").expanduser(), os.getuid()
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # "getpwuid(): uid not found: 1234"; OSError from Python 3.13 on
        return failed("UID {uid} has no line in /etc/passwd, and neither USER nor LOGNAME is set", uid=uid)
    if not os.access(home, os.W_OK | os.X_OK):
        return failed("{name} (UID {uid}) cannot write its home, {home}", name=name, uid=uid, home=str(home))
    return passed("{name}, UID {uid}, home {home}", name=name, uid=uid, home=str(home))


@check(
    "clock",
    "the clock is not behind: TLS refuses certificates of the future",
    fix="set the host's clock (`timedatectl set-ntp true`); a container has its host's",
    limit_s=10,
)
def check_clock() -> Finding:
    installed = max(Path(dist.locate_file("")).stat().st_mtime for dist in metadata.distributions(name="torch"))
    behind_days = (installed - time.time()) / 86400
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    text = "{now}, after torch was installed"
    if behind_days > 1:  # a day: file times may be in another zone's
        text = "{now} is {behind_days:.0f} days before torch was installed here"
        return failed(text, now=now, behind_days=behind_days)
    return passed(text, now=now, behind_days=behind_days)
