"""Makes a small CUDA toolkit in NVIDIA's own layout out of Debian's packages: what compiling needs, and no more.

    python3 docker/build_toolkit.py PACKAGES_FOLDER OUT       OUT/usr/local/cuda-12.4 and OUT/usr/local/cuda

Debian's package nvidia-cuda-toolkit would bring 7 GB: static libraries, profilers, and a second copy of cuBLAS and
others that torch's wheels bring. Here those links lead to the wheels' libraries (docker/link_wheels.py).
"""

import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WANTED = "12.4"
PACKAGES = [
    "nvidia-cuda-dev", "nvidia-cuda-toolkit", "libcudart12", "libcu++-dev", "libcub-dev", "libthrust-dev",
    "libnvidia-ml-dev",
]  # fmt: skip
TOOLS = ["bin2c", "cu++filt", "cudafe++", "cuobjdump", "fatbinary", "nvlink", "nvprune", "ptxas"]
LIBRARIES = ["libcudart.so*", "libcudart_static.a", "libcudadevrt.a", "libculibos.a", "stubs/libcuda.so*"]
UNWANTED = ["libnpp*", "libcublas*", "libcusparse*", "libcufft*", "libcusolver*", "libcurand*", "libnvrtc*"]
# nvcc reads where its parts are from this file. `host` holds gcc and g++: of the version that nvcc takes, whatever
# a child image installs. The headers are system headers, for they declare sinpi and cospi otherwise than glibc 2.41
# does, which is an error anywhere else.
PROFILE = """TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/host:$(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-isystem" "$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
"""
HOST_COMPILERS = {"gcc": "gcc-13", "g++": "g++-13"}


def main(packages: Path, out: Path) -> None:
    enable_non_free()
    download(packages)
    with tempfile.TemporaryDirectory() as folder:
        unpack(packages, Path(folder))
        arrange(Path(folder), out / "usr/local" / f"cuda-{WANTED}", version_of("nvidia-cuda-toolkit"))
    (out / "usr/local/cuda").symlink_to(f"cuda-{WANTED}")
    prove(out / "usr/local/cuda")


def enable_non_free() -> None:
    """CUDA is in Debian's non-free. The public base lists its mirror in deb822, debootstrap in one-line form."""
    for file in (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources")):
        if file.exists():
            text = file.read_text()
            text = re.sub(r"^(Components: .*?)$", r"\1 contrib non-free", text, flags=re.MULTILINE)
            file.write_text(re.sub(r"^(deb .* main)$", r"\1 contrib non-free", text, flags=re.MULTILINE))


def download(packages: Path) -> None:
    """Debian's packages into the folder; those of an earlier build that are still current are not loaded again."""
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    # As root: the folder is a build cache that apt's own user cannot write.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", *PACKAGES]
    subprocess.run(command, cwd=packages, check=True)


def unpack(packages: Path, into: Path) -> None:
    """Unpacks the newest version of each package, two at a time: xz takes one core each."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: unpack_one(newest(packages, name), into), PACKAGES))


def version_of(name: str) -> str:
    """The version that apt would install, without an epoch."""
    policy = subprocess.check_output(["apt-cache", "show", "--no-all-versions", name], text=True)
    return re.search(r"^Version: (?:\d+:)?(.+)$", policy, re.MULTILINE)[1]


def newest(packages: Path, name: str) -> Path:
    """The file that `apt-get download` brought or confirmed last."""
    (file,) = packages.glob(f"{name}_*{version_of(name)}_*.deb")
    return file


def unpack_one(package: Path, into: Path) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as source:
        excluded = [f"--exclude={pattern}" for pattern in UNWANTED]  # 2 GB that arrange() would leave anyway
        subprocess.run(["tar", "-x", "-C", into, *excluded], stdin=source.stdout, check=True)
    if source.returncode:
        raise SystemExit(f"dpkg-deb could not read {package}")


def arrange(found: Path, cuda: Path, version: str) -> None:
    """Debian's scattered files -> bin, nvvm, include, lib64, licenses below `cuda`."""
    debian, libraries = found / "usr/lib/nvidia-cuda-toolkit", found / "usr/lib/x86_64-linux-gnu"
    (cuda / "bin").mkdir(parents=True)
    for tool in TOOLS:
        shutil.copy2(found / "usr/bin" / tool, cuda / "bin")
    shutil.copy2(debian / "bin/nvcc", cuda / "bin")
    shutil.copytree(debian / "bin/crt", cuda / "bin/crt")
    (cuda / "bin/nvcc.profile").write_text(PROFILE)
    (cuda / "nvvm/bin").mkdir(parents=True)
    shutil.copy2(debian / "bin/cicc", cuda / "nvvm/bin")
    shutil.copytree(debian / "libdevice", cuda / "nvvm/libdevice")
    shutil.copytree(found / "usr/include", cuda / "include", symlinks=True)
    (cuda / "lib64/stubs").mkdir(parents=True)
    for pattern in LIBRARIES:
        for file in libraries.glob(pattern):
            shutil.copy2(file, cuda / "lib64" / file.relative_to(libraries), follow_symlinks=False)
    (cuda / "host").mkdir()
    for name, compiler in HOST_COMPILERS.items():
        (cuda / "host" / name).symlink_to(f"/usr/bin/{compiler}")
    # Where NVIDIA's installers write it, and tools look for it.
    (cuda / "version.json").write_text(json.dumps({"cuda": {"name": "CUDA SDK", "version": version}}) + "\n")
    for file in found.glob("usr/share/doc/*/copyright"):
        (cuda / "licenses").mkdir(exist_ok=True)
        shutil.copy2(file, cuda / "licenses" / file.parent.name)


PROGRAM = """#include <cstdio>
#include <cub/cub.cuh>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
int main() { int version = 0; cudaRuntimeGetVersion(&version); std::printf("%d", version); }
"""


def prove(cuda: Path) -> None:
    """nvcc says the wanted version, and compiles and links a program that starts on a machine without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "twice.cu", Path(folder) / "twice"
        source.write_text(PROGRAM)
        subprocess.run([cuda / "bin/nvcc", "-arch=sm_90", "-o", program, source], check=True)
        version = subprocess.check_output([program], text=True)
    said = subprocess.check_output([cuda / "bin/nvcc", "--version"], text=True)
    if f"release {WANTED}," not in said or version != "12040":
        raise SystemExit(f"wanted CUDA {WANTED}; the runtime is {version}, and nvcc says:\n{said}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
