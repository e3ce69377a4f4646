"""Training checkpoints (Orbax) and the metrics file, kept in step with each other: whole or not at all."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llamem._extras import import_extra
from llamem._files import write_whole


class Snapshots:
    """The snapshots and metrics of one run, in one folder.

    `identity` says what a snapshot belongs to (model, data, batch shape, seed), as JSON-able values; it is stored
    beside the arrays, and a snapshot of another identity is refused by name of what differs. Orbax writes into a
    temporary folder and renames it when complete, so a run killed at any moment leaves only whole snapshots. The two
    newest are kept.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]):
        self._ocp = import_extra("orbax.checkpoint", "training checkpoints")
        self.folder = Path(folder).absolute()
        self.identity = json.loads(json.dumps(identity))
        options = self._ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
        self._manager = self._ocp.CheckpointManager(self.folder / "snapshots", options=options)
        self._metrics = self.folder / "metrics.jsonl"

    def latest(self) -> int | None:
        """The step of the newest complete snapshot; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Stores every array of `state` and the identity. Returns when both are on disk under their final name."""
        args = self._ocp.args
        self._manager.save(
            step, args=args.Composite(state=args.StandardSave(_flat(state)), identity=args.JsonSave(self.identity))
        )

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state of a snapshot, in the structure, shapes and types of `abstract_state`.

        Raises ValueError for a snapshot of another identity, and for one that cannot be read.
        """
        args = self._ocp.args
        wanted = _flat(abstract_state)
        try:
            stored = self._manager.restore(step, args=args.Composite(identity=args.JsonRestore()))["identity"]
            self._check(stored)
            arrays = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(wanted)))["state"]
        except _WrongSnapshot:
            raise
        except Exception as error:
            raise ValueError(
                f"the snapshot {self.folder / 'snapshots' / str(step)} cannot be read ({type(error).__name__}: "
                f"{str(error)[:200]}). Delete that folder to go on from the one before it, or choose another output "
                f"folder."
            ) from error
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])

    def _check(self, stored: dict[str, Any]) -> None:
        differs = [
            f"{name}: snapshot {stored.get(name)!r}, now {self.identity.get(name)!r}"
            for name in sorted({*stored, *self.identity})
            if stored.get(name) != self.identity.get(name)
        ]
        if differs:
            raise _WrongSnapshot(
                f"the snapshots in {self.folder} belong to another run: {'; '.join(differs)}. "
                "Use the settings of that run, or choose another output folder."
            )

    def read_metrics(self, up_to: int) -> list[dict[str, float]]:
        """The rows of steps 1..`up_to`; later ones, written after the snapshot that is resumed, leave the file."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the run was killed while it wrote this line
                continue
            if row["step"] <= up_to:
                rows.append(row)
        write_whole(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def append_metrics(self, row: dict[str, float]) -> None:
        """Adds one line to the metrics file."""
        with open(self._metrics, "a") as file:
            file.write(json.dumps(row) + "\n")


class _WrongSnapshot(ValueError):
    pass


def fingerprint(tokens: np.ndarray) -> str:
    """A short name for a token stream: its length and a checksum of a million tokens spread over it."""
    spread = tokens[:: max(1, len(tokens) // 1_000_000)]
    return f"{len(tokens)} tokens, crc {zlib.crc32(spread.tobytes()):08x}"


def _flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
