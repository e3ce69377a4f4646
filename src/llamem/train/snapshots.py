"""Training checkpoints (Orbax) and the metrics file, kept in step with each other: whole or not at all."""

import contextlib
import json
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Integer

from llamem._extras import import_extra
from llamem._files import locked, write_whole
from llamem.train.array_sums import checksums
from llamem.train.hosts import check_folder

OnChange = Literal["refuse", "continue"]


class Snapshots:
    """The snapshots and metrics of one run, in one folder, which a `with` block holds for this process alone.

    `model` and `settings` say what a snapshot belongs to, as JSON-able values by name. They are stored beside the
    arrays, with a checksum of each array: a snapshot of another model or of other settings is refused by name of what
    differs, and one that is damaged by name of the array. Orbax writes into a temporary folder and renames it when
    complete, so a run killed at any moment leaves only whole snapshots. The two newest are kept. Of several processes
    each stores the arrays of its own devices; the first holds the folder and writes the rest.

    Entering raises NotADirectoryError where the folder is a file, and BlockingIOError where another process holds it.
    """

    def __init__(self, folder: str | os.PathLike, model: dict[str, Any], settings: dict[str, Any]):
        self._ocp = import_extra("orbax.checkpoint", "training checkpoints")
        self.folder = Path(folder).expanduser().absolute()
        self.about = json.loads(json.dumps({"model": model, "settings": settings}))
        self._metrics = self.folder / "metrics.jsonl"
        self._open = contextlib.ExitStack()
        self._first = jax.process_index() == 0  # it alone writes what all would write alike

    def __enter__(self) -> "Snapshots":
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(
                f"{self.folder} is a file: a run needs a folder, for its metrics and snapshots. Choose another one."
            )
        with contextlib.ExitStack() as opening:
            if self._first:
                why = "Two runs in one folder would mix their metrics."
                opening.enter_context(locked(self.folder / "run.lock", why))
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("the first host holds the folder")
                check_folder(self.folder)
            options = self._ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
            self._manager = self._ocp.CheckpointManager(self.folder / "snapshots", options=options)
            opening.callback(self._manager.close)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def latest(self) -> int | None:
        """The step of the newest complete snapshot; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Stores every array of `state`, with what it belongs to. Returns when all is on disk under its final name.

        Raises FloatingPointError where an array holds a NaN or an infinity, and RuntimeError where Orbax declines the
        step, since it has one as new; neither stores anything.
        """
        arrays = _flat(state)
        sums, ruined = checksums(arrays)
        if ruined:
            raise FloatingPointError(f"{_few(ruined)} of step {step} hold NaN or infinity, so they were not saved.")
        about = {**self.about, "sums": sums}
        args = self._ocp.args
        stored = self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(arrays),
                identity=args.JsonSave({"about": about, "checksum": _checksum_of_json(about)}),
            ),
        )
        if not stored:
            raise RuntimeError(
                f"step {step} was not saved: {self.folder / 'snapshots'} has one of step {self.latest()}. Steps are "
                "saved in rising order; delete what is newer, or choose another output folder."
            )

    def delete(self, step: int) -> None:
        """Removes the snapshot of a step; nothing where there is none."""
        if step in self._manager.all_steps():
            self._manager.delete(step)

    def restore(self, step: int, abstract_state: Any, on_change: OnChange = "refuse") -> Any:
        """The state of a snapshot, in the structure, shapes and types of `abstract_state`.

        Raises ValueError for a snapshot of another model, for one of other settings unless `on_change="continue"`, and
        for one that is damaged or cannot be read.
        """
        args = self._ocp.args
        wanted = {name: _here(leaf) for name, leaf in _flat(abstract_state).items()}
        try:
            stored = self._manager.restore(step, args=args.Composite(identity=args.JsonRestore()))["identity"]
            about = stored["about"]
            if _checksum_of_json(about) != stored["checksum"]:
                raise _Damaged("its description is not what was written")
            if "sums" not in about:
                raise _Damaged("an earlier version of this package wrote it, with checksums of another kind")
            self._check(about, on_change)
            with _no_flood():
                arrays = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(wanted)))["state"]
            sums, _ = checksums(arrays)
            wrong = [name for name in wanted if sums[name] != about["sums"][name]]
            if wrong:
                raise _Damaged(f"{_few(wrong)} are not the numbers that were written")
        except _WrongSnapshot:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, _Damaged) else f"{type(error).__name__}: {str(error)[:200]}"
            raise ValueError(
                f"the snapshot {self.folder / 'snapshots' / str(step)} cannot be read ({what}). Delete that folder to "
                "go on from the one before it, or choose another output folder."
            ) from error
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])

    def _check(self, stored: dict[str, Any], on_change: OnChange) -> None:
        model, settings = (_differences(stored[part], self.about[part]) for part in ("model", "settings"))
        remedy = "Use the settings of that run, or choose another output folder."
        if not model and settings and on_change == "continue":
            if self._first:
                print(f"Going on from the snapshot in {self.folder} with other settings: {'; '.join(settings)}.")
            return
        if not model and settings:
            remedy = (
                f"{remedy[:-1]}, or say train(..., on_change='continue') to go on from here with the settings of now: "
                "the curve is then not that of a run in one go."
            )
        if model or settings:
            raise _WrongSnapshot(
                f"the snapshots in {self.folder} belong to another run: {'; '.join([*model, *settings])}. {remedy}"
            )

    def cut_metrics(self, up_to: int) -> list[dict[str, float]]:
        """Rewrites the metrics file without the rows after step `up_to`, and returns those that stay.

        Later rows were written after the snapshot that is resumed, and are written again. A torn last line is left out
        too: the run was killed while it wrote it. Rows are not synced to the disk one by one, so after a power failure
        some before `up_to` may be missing: a warning names the steps. Raises ValueError for any other line that is no
        row, and leaves the file as it is.
        """
        lines = self._metrics.read_bytes().splitlines() if self._metrics.exists() else []
        rows = []
        for number, line in enumerate(lines, start=1):
            row = _row(line)
            if row is None and number < len(lines):
                raise ValueError(
                    f"line {number} of {self._metrics} is no row of metrics: {line[:80]!r}. Expected a JSON object "
                    'with a whole "step" in each line. Delete that line, or move the file away.'
                )
            if row is not None and row["step"] <= up_to:
                rows.append(row)
        if missing := sorted(set(range(1, up_to + 1)) - {row["step"] for row in rows}):
            warnings.warn(
                f"{self._metrics} lacks {len(missing)} of the steps 1 to {up_to}, the first of them {missing[0]}: the "
                "machine went down before they were on disk, or lines were deleted. Training goes on without them.",
                stacklevel=2,
            )
        if self._first:
            write_whole(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def append_metrics(self, row: dict[str, float]) -> None:
        """Adds one line to the metrics file."""
        if self._first:
            with open(self._metrics, "a") as file:
                file.write(json.dumps(row) + "\n")


class _WrongSnapshot(ValueError):
    pass


class _Damaged(ValueError):
    pass


def fingerprint(tokens: Integer[np.ndarray, " tokens"]) -> str:
    """A short name for a token stream: its length and a checksum of it."""
    return f"{len(tokens)} tokens, crc {zlib.crc32(np.ascontiguousarray(tokens).view(np.uint8).data):08x}"


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = sorted({*stored, *now})
    return [
        f"{name}: snapshot {stored.get(name)!r}, now {now.get(name)!r}"
        for name in names
        if stored.get(name) != now.get(name)
    ]


def _flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _here(leaf: Any) -> Any:
    """A leaf of a state on one device says so: without a place Orbax asks for the devices that wrote the snapshot."""
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def _checksum_of_json(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def _no_flood() -> Iterator[None]:
    # At the first array that it cannot read Orbax closes its event loop. Each read still under way then prints a
    # traceback, from a thread of its own and some time after the error: so the hook stays where there was an error.
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        said = str(unraisable.exc_value)
        if "Event loop is closed" not in said and "Encountered error while reading array" not in said:
            before(unraisable)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = before
