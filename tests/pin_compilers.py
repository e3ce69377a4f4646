"""Write the hashes and sizes of `src/jaxmem/chips/compilers.txt` anew, for the versions that stand in it.

    .venv/bin/python tests/pin_compilers.py

To move a version, write it into the file, then run this. It downloads each wheel for each Python, about 2.5 GB.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PINS = Path(__file__).resolve().parent.parent / "src" / "jaxmem" / "chips" / "compilers.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")


def download(requirement: str, folder: Path) -> list[Path]:
    """Return the wheels of a requirement, one for each Python or one for all."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    for python in PYTHONS:
        only = ["--only-binary", ":all:", "--no-deps", "--implementation", "cp", "--python-version", python]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *only, *platforms, "--dest", str(folder)]
        subprocess.run([*command, requirement], check=True)
    return sorted(folder.glob("*.whl"))


def main() -> None:
    """Rewrite the file."""
    lines: list[str] = []
    for part in re.split(r"^(?=# \[)", PINS.read_text(), flags=re.MULTILINE):
        requirements = re.findall(r"^\S+==\S+", part, re.MULTILINE)
        if not requirements:
            lines.append(part.rstrip("\n"))
            continue
        hashes: dict[str, list[str]] = {}
        size = 0
        for requirement in requirements:
            with tempfile.TemporaryDirectory() as folder:
                wheels = download(requirement, Path(folder))
                hashes[requirement] = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
                size += max(wheel.stat().st_size for wheel in wheels)
        name = re.findall(r"^# \[(\w+)\]", part)[0]
        lines.append(f"# [{name}] {size / 1e6:.0f} MB")
        for requirement, of_wheels in hashes.items():
            lines.append(" \\\n".join([requirement, *(f"    --hash=sha256:{one}" for one in of_wheels)]))
    PINS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
