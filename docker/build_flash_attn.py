"""Puts a flash-attn wheel into a folder, or says why it cannot be had.

    python docker/build_flash_attn.py wheel|source|none OUT

wheel   the release's own, by URL and sha256 (docker/flash_attn.json): 245 MB, for this image's torch, ABI and Python
source  compiled here: about 5 CPU-hours for one card family; MAX_JOBS and FLASH_ATTN_CUDA_ARCHS ("80;90") bound it
none    nothing; ATTN=auto then takes xformers for packed rows

OUT/flash-attn.txt says what was chosen.
"""

import hashlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

PIN = Path(__file__).with_name("flash_attn.json")
CHOICES = "FLASH_ATTN=source compiles it (5 CPU-hours), FLASH_ATTN=none leaves it out"


def main(choice: str, out: Path) -> int:
    out.mkdir(parents=True)
    pin = json.loads(PIN.read_text())
    (out / "flash-attn.txt").write_text(f"{choice}\n" if choice == "none" else f"{choice} {pin['version']}\n")
    if choice == "wheel":
        return download(pin, out)
    if choice == "source":
        return compile_wheel(pin, out)
    if choice == "none":
        return 0
    print(f"error: FLASH_ATTN={choice}\n  fix: FLASH_ATTN=wheel, source or none", file=sys.stderr)
    return 2


def download(pin: dict[str, str], out: Path) -> int:
    """The release's wheel; 2 and a message with the other two choices where it cannot be had."""
    try:
        with urllib.request.urlopen(pin["url"], timeout=60) as answer:
            wheel = answer.read()
    except (urllib.error.URLError, OSError) as error:
        print(f"error: flash-attn's wheel was not reached: {error}\n  {pin['url']}\n  fix: {CHOICES}", file=sys.stderr)
        return 2
    found = hashlib.sha256(wheel).hexdigest()
    if found != pin["sha256"]:
        text = f"error: flash-attn's wheel has sha256 {found}, not {pin['sha256']}\n  {pin['url']}\n  fix: {CHOICES}"
        print(text, file=sys.stderr)
        return 2
    # The + of the local version is %2B in some URLs, and an installer wants it plain.
    (out / pin["url"].rpartition("/")[2].replace("%2B", "+")).write_bytes(wheel)
    return 0


def compile_wheel(pin: dict[str, str], out: Path) -> int:
    """The source archive from the package index, its sha256 checked, compiled for FLASH_ATTN_CUDA_ARCHS."""
    requirement = out / "source.txt"
    requirement.write_text(f"flash-attn=={pin['version']} --hash=sha256:{pin['source_sha256']}\n")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-binary", "flash-attn"]
    command = [*pip, "--require-hashes", "--wheel-dir", out, "--requirement", requirement]
    done = subprocess.run(command, env=os.environ | {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"})
    requirement.unlink()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
