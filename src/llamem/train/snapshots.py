"""Training checkpoints (Orbax) and the metrics file of a run, kept in step with each other: whole or not at all."""

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxmem.common.checks import few, import_extra
from jaxmem.common.files import locked, write_whole
from jaxmem.tracing.arguments import on_host
from llamem.layers.host_memory import to_device
from llamem.train.hosts import check_folder

OnChange = Literal["refuse", "continue"]


class Snapshots:
    """The snapshots and metrics of one run, in one folder, which a `with` block holds for this process alone.

    `model` and `settings` say what a snapshot belongs to, as JSON-able values by name. They are stored beside the
    arrays, with a sum of each array: the files that Orbax writes have none. It writes into a temporary folder and
    renames it when complete, so a run killed at any moment leaves only whole snapshots. The two newest are kept; what
    is damaged or led to no finite loss is set aside under a free name, and never deleted. On several hosts each stores
    the arrays of its own devices; the first holds the folder and writes the rest.

    Entering raises BlockingIOError where another process holds the folder, OSError where nothing can be written.
    """

    def __init__(self, folder: str | os.PathLike, model: dict[str, Any], settings: dict[str, Any]):
        self._ocp = import_extra("orbax.checkpoint", "training checkpoints")
        self.folder = Path(folder).expanduser().absolute()
        self.about = json.loads(json.dumps({"model": model, "settings": settings}))
        self._metrics = self.folder / "metrics.jsonl"
        self._open = contextlib.ExitStack()
        self._own: set[int] = set()  # the steps that were saved here
        self._is_first_host = jax.process_index() == 0  # it alone writes what all would write alike

    def __enter__(self) -> "Snapshots":
        with contextlib.ExitStack() as opening:
            if self._is_first_host:
                why = "Two runs in one folder would mix their metrics."
                with self._writing("the folder of this run"):
                    opening.enter_context(locked(self.folder / "run.lock", why))
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("the first host holds the folder")
                check_folder(self.folder)
            options = self._ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
            with self._writing("the snapshots of this run"):
                self._manager = self._ocp.CheckpointManager(self.folder / "snapshots", options=options)
            opening.callback(self._manager.close)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def latest(self) -> int | None:
        """Return the step of the newest complete snapshot; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, *, read: int) -> None:
        """Store every array of `state`, and how many sequences the run has `read`. Return when all is on disk.

        Raise FloatingPointError, and store nothing, where arrays hold NaN or infinity, OSError where the disk refuses.
        """
        arrays = _by_name(state)
        sums, finite = _sums(arrays)
        if ruined := [name for name in arrays if not finite[name]]:
            raise FloatingPointError(f"{few(ruined)} of step {step} hold NaN or infinity, so they were not saved.")
        about, args = {**self.about, "step": step, "read": read, "sums": sums}, self._ocp.args
        identity = args.JsonSave({"about": about, "checksum": _checksum(about)})
        with self._writing(f"the snapshot of step {step}"):
            contents = args.Composite(state=args.StandardSave(arrays), identity=identity)
            self._manager.save(step, args=contents, force=True)
        self._own.add(step)

    def distrust(self, step: int) -> None:
        """Set aside the snapshot of a step after which the loss was not finite, as `snapshots/diverged-STEP`.

        It stays where it is the only one, or where another process wrote it, which went on from it in its time: then
        what is new may be the cause, a chip, a driver, a plan.
        """
        if step in self._own and len(self._manager.all_steps()) > 1:
            self._set_aside([step], "diverged")

    def restore(self, abstract_state: Any, on_change: OnChange = "refuse") -> tuple[int, Any, dict[str, Any]]:
        """Return the step and state of the newest whole snapshot, in the structure, shapes and types asked for.

        Third comes what was stored beside them: "model" and "settings" of that run, and "read", how many sequences.

        A damaged one is named in a warning and set aside as `snapshots/damaged-STEP`, and the one before it is taken.
        Raise ValueError for a snapshot of another model, for one of other settings unless `on_change="continue"`, and
        where every snapshot is damaged.
        """
        damage: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                with _orbax_silenced():
                    contents = self._read_unless_damaged(step, abstract_state, on_change, damage)
            except _OtherRun as other:
                raise ValueError(str(other)) from None
            if contents is not None:
                for other, why in damage.items() if self._is_first_host else ():
                    folder = self.folder / "snapshots" / str(other)
                    warnings.warn(
                        f"the snapshot {folder} is damaged ({why}): the one before it is taken.", stacklevel=3
                    )
                self._set_aside(list(damage), "damaged")
                return step, *contents
        raise ValueError(
            f"no snapshot in {self.folder / 'snapshots'} can be read: "
            f"{'; '.join(f'{step}: {why}' for step, why in damage.items())}. Delete that folder to begin at step 0, or "
            "choose another output folder."
        )

    def _read_unless_damaged(
        self, step: int, abstract_state: Any, on_change: OnChange, damage: dict[int, str]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Return what `_read` does; None for a damaged snapshot, with the reason under its step in `damage`."""
        try:
            return self._read(step, abstract_state, on_change)
        except _OtherRun:
            raise
        except Exception as error:  # Orbax and tensorstore raise whatever they meet
            if isinstance(error, OSError) and error.errno in _OF_THE_MOMENT:
                raise
            kind = "" if isinstance(error, _Damaged) else f"{type(error).__name__}: "
            damage[step] = f"{kind}{str(error)[:200]}"
            return None

    def _read(self, step: int, abstract_state: Any, on_change: OnChange) -> tuple[Any, dict[str, Any]]:
        args = self._ocp.args
        stored = self._manager.restore(step, args=args.Composite(identity=args.JsonRestore()))["identity"]
        about = stored["about"]
        if _checksum(about) != stored["checksum"]:
            raise _Damaged("its description is not what was written")
        if (written := about.get("step", step)) != step:
            raise _Damaged(f"it is that of step {written}, under another name")
        self._check(about, on_change)
        wanted = {name: _with_sharding(leaf) for name, leaf in _by_name(abstract_state).items()}
        self._check_names(list(about.get("sums", ())), list(wanted))
        arrays = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(wanted)))["state"]
        sums, _ = _sums(arrays)
        if wrong := [name for name in wanted if sums[name] != about["sums"][name]]:
            raise _Damaged(f"{few(wrong)} are not the numbers that were written")
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted]), about

    def _set_aside(self, steps: list[int], why: str) -> None:
        """Give the snapshots of these steps names that are free and no step's."""
        if not steps:
            return
        for step in steps if self._is_first_host else ():
            folder = self.folder / "snapshots" / str(step)
            folder.rename(_free_name(folder.with_name(f"{why}-{step}")))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("snapshots are set aside")
        self._manager.reload()

    def _check(self, stored: dict[str, Any], on_change: OnChange) -> None:
        model, settings = (_differences(stored[part], self.about[part]) for part in ("model", "settings"))
        remedy = "Use the settings of that run, or choose another output folder"
        if not model and settings and on_change == "continue":
            if self._is_first_host:
                print(f"Going on with other settings than the snapshot's: {'; '.join(settings)}.")
            return
        if not model:
            remedy += (
                ", or say train(..., on_change='continue'), of scale/train.py --on-change continue, to go on from here "
                "with the settings of now: the curve is then not that of a run in one go"
            )
        if model or settings:
            differences = "; ".join([*model, *settings])
            raise _OtherRun(f"the snapshots in {self.folder} belong to another run: {differences}. {remedy}.")

    def _check_names(self, stored: list[str], wanted: list[str]) -> None:
        """Raise ValueError where a state of another layout was stored, as other versions of the package have them."""
        missing, unknown = ([n for n in a if n not in b] for a, b in ((wanted, stored), (stored, wanted)))
        if missing or unknown:
            lists = {"it lacks": missing, "it holds what is not known here": unknown}
            differences = "; ".join(f"{what}: {few(names)}" for what, names in lists.items() if names)
            raise _OtherRun(
                f"the snapshots in {self.folder} hold a training state of another layout, perhaps of another version "
                f"of llamem: {differences}. Go on with the version that wrote them, or choose another output folder."
            )

    def cut_metrics(self, up_to: int) -> list[dict[str, Any]]:
        """Rewrite the metrics file without the rows after step `up_to`, and return those that stay.

        Later rows were written after the snapshot that is resumed, and are written again; the last may be torn. Another
        line that is no row is left out, too, and at step 0 every row: the file as it was is then kept beside, and a
        warning names both.
        """
        written = self._metrics.read_bytes() if self._metrics.exists() else b""
        *lines, unfinished = written.split(b"\n")
        lines += [unfinished] if _row(unfinished) else []
        kept = [_row(line) for line in lines]
        odd = [str(i) for i, line in enumerate(lines, 1) if kept[i - 1] is None and line.strip()]
        rows = [row for row in kept if row is not None and row["step"] <= up_to]
        if self._is_first_host:
            with self._writing("the metrics of this run"):
                if odd or (written.strip() and not up_to):
                    as_it_was = _free_name(self._metrics.with_name("metrics-as-it-was.jsonl"))
                    write_whole(as_it_was, written)
                    why = (
                        f", line {few(odd)}: no row of a step, so it is left out, and the others stay"
                        if up_to
                        else ": no snapshot goes on from its rows, so that the run begins at step 0 in a new file"
                    )
                    kept_as = f"The file as it was is kept as {as_it_was.name}."
                    warnings.warn(f"{self._metrics}{why}. {kept_as}", stacklevel=3)
                write_whole(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def describe(self, described: Mapping[str, str]) -> None:
        """Write `run.json`: how the run is computed, on what, and what its compiled step needs, in words by name."""
        if self._is_first_host:
            with self._writing("the description of this run"):
                write_whole(self.folder / "run.json", json.dumps(dict(described), indent=1) + "\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to the metrics file."""
        if self._is_first_host:
            with self._writing("a row of the metrics"), open(self._metrics, "a") as file:
                file.write(json.dumps(row) + "\n")

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Say in one sentence what the disk refuses, or what is in the way; anything else is raised as it is."""
        try:
            yield
        except (BlockingIOError, ConnectionError):
            raise
        except Exception as error:  # Orbax raises what it meets
            if not isinstance(error, OSError) and not re.search(_OF_THE_DISK, str(error)):
                raise
            kind = type(error) if isinstance(error, OSError) else OSError
            free = next(shutil.disk_usage(place).free for place in self.folder.parents if place.is_dir())
            raise kind(
                f"{what} cannot be written into {self.folder}: {' '.join(str(error).split())[:200]}. {free / 1e9:.1f} "
                "GB are free there. What was written before stays: make room, or move what is in the way, and the same "
                "call goes on; or choose another output folder."
            ) from None


# Of a disk or a machine, which may pass; what was written may be whole.
_OF_THE_MOMENT = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM)
# What tensorstore and Orbax say where a system call failed.
_OF_THE_DISK = "No space left on device|File too large|quota exceeded|RESOURCE_EXHAUSTED|Read-only file system"


def _free_name(path: Path) -> Path:
    """Return this name, or the first of NAME-2, NAME-3 .. that nothing has."""
    others = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not os.path.lexists(name))


def _row(line: bytes) -> dict[str, Any] | None:
    """Return what a line of the metrics file says of a step; None where it is no such row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("loss"), int | float)
    return row if is_row else None


class _OtherRun(ValueError):
    pass


class _Damaged(ValueError):
    pass


@contextlib.contextmanager
def _orbax_silenced() -> Iterator[None]:
    """Keep back what Orbax says of a snapshot that it cannot read, up to hundreds of lines: our warning says it once.

    It logs, its threads print what they cannot raise, and so does every read that it gave up, when it is collected.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before, hook = [logger.disabled for logger in loggers], sys.unraisablehook
    sys.unraisablehook = lambda _: None
    for logger in loggers:
        logger.disabled = True
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = hook
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def checksum(params: Any) -> str:
    """Return a short name for the numbers of a tree of arrays, wherever they lie."""
    return f"{_checksum(_sums(_by_name(params))[0]):08x}"


def _sums(arrays: dict[str, Any]) -> tuple[dict[str, int], dict[str, bool]]:
    """Return each array's sum of bits, and whether its numbers are finite: the same however the array is spread."""
    results = {name: _sum_of_bits(array) for name, array in arrays.items()}
    return {n: int(total) for n, (total, _) in results.items()}, {n: bool(finite) for n, (_, finite) in results.items()}


@jax.jit
def _sum_of_bits(x: Any) -> tuple[jax.Array, jax.Array]:
    """Sum bits modulo 2**32, each element times an odd number of its place: one changed element changes the sum."""
    x = to_device(x) if on_host(x.aval) else x
    bits = x.astype(jnp.uint8) if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    finite = jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(True)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32), finite


def _differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = [name for name in sorted({*stored, *now}) if stored.get(name) != now.get(name)]
    return [f"{name}: snapshot {stored.get(name)!r}, now {now.get(name)!r}" for name in changed]


def _by_name(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _with_sharding(leaf: Any) -> Any:
    """Put a leaf without a sharding on this process's device: else Orbax asks for the devices that wrote it."""
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def _checksum(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())
