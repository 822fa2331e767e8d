"""One copy of each CUDA library, the wheels' own: known to the linker, and linked from the toolkit's folder.

python docker/link_wheels.py SITE_PACKAGES
"""

import os
import subprocess
import sys
from pathlib import Path

# torch finds its CUDA libraries by itself; ldconfig tells all others where they are (this script writes it).
LINKER = Path("/etc/ld.so.conf.d/slipway.conf")
# What `-lcublas` and tools that look below CUDA_HOME expect to find in the toolkit.
CUDA_LIBRARIES = Path("/usr/local/cuda/lib64")


def main(packages: Path) -> None:
    folders = [packages / "torch/lib", *sorted(packages.glob("nvidia/*/lib"))]
    LINKER.write_text("".join(f"{folder}\n" for folder in folders))
    for file in packages.glob("nvidia/*/lib/lib*.so.*"):
        for name in (file.name, f"{file.name.partition('.so')[0]}.so"):
            link = CUDA_LIBRARIES / name
            if not os.path.lexists(link):  # libcudart is the toolkit's own
                link.symlink_to(file)
    subprocess.run(["ldconfig"], check=True)
    known = subprocess.check_output(["ldconfig", "-p"], text=True)
    if "libcublas.so" not in known or not (CUDA_LIBRARIES / "libcublas.so").exists():
        raise SystemExit(f"the linker does not know the CUDA libraries of {packages}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
