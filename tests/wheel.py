"""Checks what `make wheel` built: what is inside, how large it is, and that README's Python runs from it.

`python tests/wheel.py FOLDER`, with one sdist and one wheel in the folder. The snippets run in an environment of their
own, in which nothing but the wheel and what it asks for is installed.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 1_200_000  # bytes: nearly half are answers of compilers that are stored with the course
FOREIGN = re.compile(r"(^|/)(tests?|notebooks|benchmarks|runs|build)/|\.ipynb$|(^|/)test_\w+\.py$|__pycache__")


def snippets() -> list[str]:
    """README's Python, as a reader copies it."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def check_contents(file: Path) -> None:
    """Ends the program where the file is too large, or holds what is no part of the package, or lacks a part of it."""
    if file.suffix == ".whl":
        names, folder = zipfile.ZipFile(file).namelist(), ""
    else:
        with tarfile.open(file) as archive:
            names, folder = [name.partition("/")[2] for name in archive.getnames()], "src/"
    if foreign := sorted(name for name in names if FOREIGN.search(name.removeprefix("src/"))):
        sys.exit(f"{file.name} holds what is no part of the package: {', '.join(foreign[:9])}. See MANIFEST.in.")
    listing = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name.removeprefix("src/") for name in listing.stdout.splitlines()}
    if missing := sorted(expected - {name.removeprefix(folder) for name in names}):
        sys.exit(f"{file.name} lacks {', '.join(missing[:9])}. See package-data in pyproject.toml.")
    if (size := file.stat().st_size) > LARGEST:
        sys.exit(f"{file.name} has {size} bytes, more than {LARGEST}: what in it is not needed?")
    print(f"{file.name}: {size} bytes, {len(names)} files")


def run_snippets(wheel: Path) -> None:
    """Installs the wheel in an environment of its own and runs README's Python there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
        lock = ROOT / "requirements" / "lock.txt"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", lock]
        subprocess.run([*install, f"llamem[train] @ {wheel.resolve().as_uri()}"], check=True)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for snippet in snippets():
            result = subprocess.run([python, "-c", snippet], cwd=folder, env=clean, capture_output=True, text=True)
            promised = re.findall(r"# prints (.*)", snippet)
            if result.returncode or any(text not in result.stdout for text in promised):
                sys.exit(f"README's snippet fails in the installed package:\n{snippet}\n{result.stdout}{result.stderr}")
    print(f"README's {len(snippets())} snippets run from the installed package")


def main(folder: Path) -> None:
    """Checks the one sdist and the one wheel in a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_contents(wheel)
    check_contents(sdist)
    run_snippets(wheel)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
