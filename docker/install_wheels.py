"""Installs the wheels in a folder, if there are any, and imports what they bring.

python docker/install_wheels.py FOLDER
"""

import subprocess
import sys
from pathlib import Path


def main(folder: Path) -> None:
    for wheel in sorted(folder.glob("*.whl")):
        uv = [Path(sys.executable).parent / "uv", "pip", "install", "--offline", "--no-deps", "--compile-bytecode"]
        subprocess.run([*uv, "--python", sys.executable, wheel], check=True)
        # An undefined symbol shows at import: a wheel for another torch, or for its older C++ interface.
        subprocess.run([sys.executable, "-c", f"import {wheel.name.partition('-')[0]}"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
