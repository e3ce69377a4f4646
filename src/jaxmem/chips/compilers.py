"""The compilers of chips that are not there: a folder of their own, with one pinned set for every Python and JAX.

An absent chip's compiler runs in a child process. What that child imports is not what the reader has installed, but
what stands in `compilers.txt`, so that the same program gets the same answer in Colab, on a laptop and here. Which
compilers answer is one rule:

1. those in the folder (`compilers_folder`): the pinned set, which reads what JAX 0.7.2 to 0.10.2 trace, or for a newer
   JAX that JAX's own, since a compiler need not read what a newer JAX traces, with the newest libtpu;
2. else those of the environment of this process, where they are whole: jaxlib 0.10 or newer, and libtpu or the CUDA
   plugin beside it;
3. else none: `fetch_compilers` brings the folder.
"""

import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Literal

import jax
import jaxlib

from jaxmem.common.files import cache_folder, locked, setting, whole_folder

Kind = Literal["tpu", "gpu", "all"]

_MARK = "fetched-by-jaxmem"  # a file in each folder of ours: what bears it may be removed
_READS_UP_TO = (0, 10, 2)  # the newest JAX whose programs the pinned set was seen to read
PINS = Path(__file__).with_name("compilers.txt")
# Of each platform: the folders that its child imports from, and the packages that name its compiler.
_PARTS = {"tpu": ("jax", "tpu"), "cuda": ("jax", "gpu")}
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")}
_MODULES = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "nvidia.cuda_nvcc")}
_UNPACKED = {"jax": 0.6e9, "tpu": 0.8e9, "gpu": 1.0e9}  # bytes that a part needs on the disk while it is installed


@dataclasses.dataclass(frozen=True)
class Compilers:
    """Compilers for one platform: the folders that a child process imports from, none for this environment's own.

    `name` says whose word an answer is: "jax 0.10.1, libtpu 0.0.51, own folder".
    """

    name: str
    folders: tuple[Path, ...] = ()

    def command(self, script: str, folder: Path) -> list[str]:
        """Return what starts `script FOLDER` in a child that imports from these folders, or from this environment."""
        if not self.folders:
            # -P: the modules beside the script are not to be found under their bare names.
            return [sys.executable, "-P", script, str(folder)]
        # -I and -S: nothing of the user's is found, no variable, no site-packages and none of their plugins.
        return [sys.executable, "-I", "-S", script, str(folder), *map(str, self.folders)]


def find_compilers(target: str) -> Compilers | None:
    """Return the compilers for the platform "tpu" or "cuda" by the rule above; None where there are none."""
    folders = tuple(_version_folder() / part for part in _PARTS[target])
    if all(folder.is_dir() for folder in folders):
        versions = {name: version for folder in folders for name, version in _packages_in(folder).items()}
        return Compilers(_named(versions, target, "own folder"), folders)
    if _own_are_whole(target):
        versions = {name: metadata.version(name) for name in ("jax", *_COMPILERS[target])}
        return Compilers(_named(versions, target, "this environment"))
    return None


def no_compilers(chip: str, target: str) -> str:
    """Return a sentence on how to get the compilers that are missing for this chip."""
    kind = {"tpu": "tpu", "cuda": "gpu"}[target]
    if unsupported := _unsupported():
        return f"no program can be compiled for {chip!r} here: {unsupported}"
    folder = _version_folder()
    others = sorted(other.name for other in compilers_folder().glob("jax-[0-9]*") if other.name != folder.name)
    hint = f" {compilers_folder()} holds only {', '.join(others)}, and {folder.name} is needed." if others else ""
    return (
        f"compiling for {chip!r} needs that chip's compiler, once: jaxmem.fetch_compilers({kind!r}), or in a shell "
        f"`python -m jaxmem compilers --chip {kind}` ({_megabytes(kind)} MB, into {folder}).{hint}"
    )


def compilers_folder() -> Path:
    """Return the folder of compilers: `$JAXMEM_COMPILERS`, or `compilers` in the cache folder.

    Raises ValueError where `$JAXMEM_COMPILERS` is a file.
    """
    path = setting("COMPILERS")
    folder = Path(path).expanduser() if path else cache_folder("compilers")
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"JAXMEM_COMPILERS={path}: that is no folder. Name the folder that compilers were or shall be fetched into."
        )
    return folder


def fetch_compilers(chip: Kind = "all", *, path: str | Path | None = None, progress: bool = True) -> Path:
    """Fetch the compilers for TPUs, for NVIDIA GPUs, or for both, into a folder of their own; return that folder.

    What is there already is not fetched again. pip or uv installs the versions of `compilers.txt`, each held to its
    hash; for a JAX that is newer than those, that JAX's own and the newest libtpu. Your
    environment stays as it is. A part appears whole or not at all, and a second process that fetches meanwhile is told
    so.

    `path`: the folder, `$JAXMEM_COMPILERS` or `~/.cache/llamem/compilers` unless told. Where you choose one here, set
    `JAXMEM_COMPILERS` to it, too, so that it is found. `progress` prints the megabytes as they come.

    Raises ValueError for an unknown `chip`, OSError for a disk that is full or cannot be written and where the network
    cannot be reached, BlockingIOError where another process fetches, RuntimeError for a platform without compilers and
    for a wheel that is damaged.
    """
    if chip not in ("tpu", "gpu", "all"):
        raise ValueError(f"fetch_compilers({chip!r}): expected 'tpu', 'gpu' or 'all'.")
    if unsupported := _unsupported():
        raise RuntimeError(f"no compilers can be fetched here: {unsupported}")
    root = Path(path).expanduser() if path else compilers_folder()
    folder = _version_folder(root)
    missing = [part for part in _parts(chip) if not (folder / part).is_dir()]
    if not missing:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(folder).free, sum(_UNPACKED[part] for part in missing)
        if free < needed:
            raise OSError(f"{free / 1e9:.1f} GB are free there, and {needed / 1e9:.1f} are needed")
        with locked(folder / "lock", "It fetches compilers."):
            for part in missing:
                _remove_marked(folder, ".*")  # what a process left that was killed while it fetched
                if not (folder / part).is_dir():
                    with whole_folder(folder / part) as unfinished:
                        _install(part, unfinished, progress)
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(
            f"the compilers cannot be fetched into {folder}: {error}. Nothing is left half there. Another folder: "
            "jaxmem.fetch_compilers(path=...), and JAXMEM_COMPILERS set to it."
        ) from error
    return folder


def remove_compilers(path: str | Path | None = None) -> list[Path]:
    """Remove all compilers that were fetched, of every version, and nothing else; return the folders that are gone.

    What was fetched carries a mark; whatever else the folder holds, under whatever name, stays. Raises BlockingIOError
    where another process fetches.
    """
    root, removed = Path(path).expanduser() if path else compilers_folder(), []
    for folder in sorted({mark.parents[1] for mark in root.glob(f"*/*/{_MARK}")}):
        if folder.is_symlink():  # what it holds is elsewhere, and others may use it
            continue
        with locked(folder / "lock", "It fetches compilers."):
            removed += _remove_marked(folder)
        (folder / "lock").unlink()
        with contextlib.suppress(OSError):  # something else is in there
            folder.rmdir()
    return removed


def _version_folder(root: Path | None = None) -> Path:
    """Return where the compilers stand that serve this Python and this JAX."""
    return (root or compilers_folder()) / f"jax-{_wanted_version()}-{sys.implementation.cache_tag}"


def _wanted_version() -> str:
    pinned = re.findall(r"^jax==(\S+)", PINS.read_text(), re.MULTILINE)[0]
    return jax.__version__ if jax.__version_info__ > _READS_UP_TO else pinned


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _own_are_whole(target: str) -> bool:
    return _numbers(jaxlib.__version__) >= (0, 10) and all(map(_is_installed, _MODULES[target]))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _packages_in(folder: Path) -> dict[str, str]:
    return {dist.name: dist.version for dist in metadata.distributions(path=[str(folder)])}


def _named(versions: dict[str, str], target: str, place: str) -> str:
    compiler = _COMPILERS[target][0]
    return f"jax {versions['jax']}, {compiler} {versions[compiler]}, {place}"


def _unsupported() -> str:
    if jax.__version_info__ < (0, 7, 2):
        return f"JAX {jax.__version__} writes no programs that another process can read; update it to 0.7.2 or newer."
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"the compilers for TPUs and GPUs exist for Linux on x86-64 only; this is {sys.platform} on "
            f"{platform.machine()}."
        )
    return ""


def _parts(chip: str) -> tuple[str, ...]:
    return ("jax", "tpu", "gpu") if chip == "all" else ("jax", chip)


def _megabytes(chip: str) -> int:
    sizes = dict(re.findall(r"^# \[(\w+)\] (\d+) MB$", PINS.read_text(), re.MULTILINE))
    return sum(int(sizes[part]) for part in _parts(chip))


def _pinned(part: str) -> str:
    """Return the lines of `compilers.txt` for one part."""
    _, _, rest = PINS.read_text().partition(f"# [{part}]")
    return rest.partition("\n")[2].partition("# [")[0]


def _newer(part: str) -> str:
    """Return what to install of one part for a JAX that is newer than the pinned one."""
    version = jax.__version__
    if part == "tpu":
        # JAX names the libtpu of its day, which can be older than ours: a newer one reads what an older one does.
        named = [line.partition(";")[0] for line in metadata.requires("jax") or () if line.startswith("libtpu")]
        ours = re.findall(r"^libtpu==(\S+)", PINS.read_text(), re.MULTILINE)
        return f"libtpu>={max([*ours, *(re.findall(r'[0-9.]*[0-9]', line)[0] for line in named)], key=_numbers)}"
    packages = {"jax": ("jax", "jaxlib"), "gpu": ("jax-cuda12-plugin", "jax-cuda12-pjrt")}[part]
    held = [f"{package}=={version}" for package in packages]
    return "\n".join(held + (["nvidia-cuda-nvcc-cu12", "flatbuffers"] if part == "gpu" else ["flatbuffers"]))


def _install(part: str, folder: Path, progress: bool) -> None:
    """Install one part of the compilers into an empty folder."""
    is_pinned = jax.__version_info__ <= _READS_UP_TO
    wanted, temporary = folder / "wanted.txt", folder / "temporary"
    (folder / _MARK).write_text("What is in this folder was fetched by `python -m jaxmem compilers`.\n")
    wanted.write_text(_pinned(part) if is_pinned else _newer(part))
    temporary.mkdir()
    options = ["--target", str(folder), "--only-binary", ":all:", "--requirement", str(wanted)]
    if is_pinned:
        options += ["--require-hashes", "--no-deps"]
    elif part != "jax":
        options.append("--no-deps")
    with (temporary / "words").open("w+") as words:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen([*_installer(), *options], stdout=words, stderr=words, env=environment) as installer:
            try:
                _show_megabytes(installer, temporary, part, progress)
            except BaseException:
                installer.kill()
                raise
        if installer.returncode:
            words.seek(0)
            raise _why_not(words.read())
    shutil.rmtree(temporary)
    wanted.unlink()


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--quiet"]
    raise OSError("neither pip nor uv is here to install them")


def _show_megabytes(installer: subprocess.Popen, folder: Path, part: str, progress: bool) -> None:
    """Print how much has arrived until the installer ends, and where it ended."""
    names = {"jax": "JAX for the compilers", "tpu": "the compiler for TPUs", "gpu": "the compiler for NVIDIA GPUs"}
    whole = int(re.findall(rf"^# \[{part}\] (\d+) MB$", PINS.read_text(), re.MULTILINE)[0])
    start, arrived = time.perf_counter(), 0
    while True:
        ended = installer.poll() is not None
        arrived = whole if ended else max(arrived, min(whole, _wheel_bytes(folder) // 10**6))
        if progress:
            seconds = time.perf_counter() - start
            line = f"\rfetching {names[part]}: {arrived:4} of {whole} MB, {seconds:.0f} s"
            print(line, end="\n" if ended else "", flush=True)
        if ended:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            installer.wait(0.5)


def _wheel_bytes(folder: Path) -> int:
    total = 0
    for wheel in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            total += wheel.stat().st_size
    return total


def _why_not(words: str) -> Exception:
    """Return the error for what an installer said last."""
    last = " ".join(words.split())[-400:]
    if "No space left on device" in words:
        return OSError("the disk is full")
    if re.search(r"DO NOT MATCH THE HASHES|Hash mismatch", words, re.IGNORECASE):
        return RuntimeError(f"a wheel is not the one that is pinned: it is damaged, or its index has another. {last}")
    if re.search(r"name resolution|connection|network|timed out|No matching distribution", words, re.IGNORECASE):
        return OSError(f"the package index cannot be reached, or does not have them ({last})")
    return OSError(f"the installer failed: {last}")


def _remove_marked(folder: Path, pattern: str = "*") -> list[Path]:
    """Remove the folders inside `folder` that bear our mark, and return them; its lock says that none is at it."""
    marked = [part for part in sorted(folder.glob(pattern)) if (part / _MARK).is_file() and not part.is_symlink()]
    for part in marked:
        shutil.rmtree(part)
    return marked
