"""Lists what is in the image: a CycloneDX file of every Python and Debian package, and the licences of all.

python docker/write_sbom.py OUT       OUT/sbom.cdx.json, OUT/licences.txt
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

DEBIAN_FIELDS = "${Package}\t${Version}\t${Architecture}\n"
CUDA_LICENCES = Path("/usr/local/cuda/licenses")


def main(out: Path) -> None:
    components = python_packages() + debian_packages() + toolkit()
    out.mkdir(parents=True, exist_ok=True)
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}
    (out / "sbom.cdx.json").write_text(json.dumps(sbom, indent=1) + "\n")
    (out / "licences.txt").write_text("".join(f"{line(component)}\n" for component in components))
    without = [component["name"] for component in components if not component["licenses"]]
    if without:
        raise SystemExit(f"no licence found for {', '.join(without)}")


def component(kind: str, name: str, version: str, licence: str) -> dict:
    licences = [{"license": {"name": licence}}] if licence else []
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:{kind}/{name}@{version}",
        "licenses": licences,
    }


def line(found: dict) -> str:
    licence = found["licenses"][0]["license"]["name"] if found["licenses"] else "?"
    return f"{found['purl']}\t{licence}"


def python_packages() -> list[dict]:
    found = {dist.name.lower(): dist for dist in importlib.metadata.distributions()}
    return [component("pypi", name, dist.version, python_licence(dist)) for name, dist in sorted(found.items())]


def python_licence(dist: importlib.metadata.Distribution) -> str:
    """What the package says, in the newest field it uses, else the first line of its licence file."""
    fields = dist.metadata
    named = [value.rpartition(":: ")[2] for value in fields.get_all("Classifier", []) if value.startswith("License ::")]
    said = fields.get("License-Expression") or ", ".join(named) or fields.get("License") or ""
    if not said:
        files = [file for file in dist.files or [] if re.search(r"LICEN[CS]E|COPYING|EULA", file.name, re.IGNORECASE)]
        said = files[0].read_text().strip() if files else ""
    return said.strip().partition("\n")[0].strip()


def debian_packages() -> list[dict]:
    rows = subprocess.check_output(["dpkg-query", "-W", "-f", DEBIAN_FIELDS], text=True).splitlines()
    found = []
    for name, version, _ in (row.split("\t") for row in rows):
        found.append(
            component("deb/debian", name, version, debian_licence(Path("/usr/share/doc") / name / "copyright"))
        )
    return found


def debian_licence(file: Path) -> str:
    """The licences that a copyright file names; the file itself where it is written in free form."""
    if not file.exists():
        return ""
    named = re.findall(r"^License: *(\S.*)$", file.read_text(errors="replace"), re.MULTILINE)
    return ", ".join(dict.fromkeys(named)) or f"see {file}"


def toolkit() -> list[dict]:
    """The parts of the CUDA toolkit, which dpkg does not know here: docker/build_toolkit.py chose from them."""
    version = json.loads((CUDA_LICENCES.parent / "version.json").read_text())["cuda"]["version"]
    files = sorted(CUDA_LICENCES.iterdir())
    return [component("generic", file.name, version, f"see {file}") for file in files]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
