"""`python -m llamem plan llama3.2-1b --chip v5e-1 --tokens 131072`: the planner for a shell, as a table or as JSON."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from llamem.llama import LlamaConfig, MeshShape
from llamem.memory import CHIPS, GiB
from llamem.planner.candidates import words
from llamem.planner.search import Found, NothingFits, find_plan, longest_context

FITS, NOTHING_FITS, BAD_INPUT = 0, 1, 2
_HEAD = ("model", "chip", "batch x tokens", "GiB", "of", "host GiB", "s a step, estimated", "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is found; returns 0 where every question has a plan, 1 where one has none, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m llamem", description="Llama 3 in less memory.")
    plan = parser.add_subparsers(dest="command", required=True).add_parser(
        "plan",
        help="find how to train a model on a chip",
        description="Finds the fastest plan, by estimate, that a chip's compiler accepts for one AdamW step.",
        epilog="Exit status: 0 it fits, 1 nothing fits, 2 bad input.",
    )
    plan.add_argument(
        "models", nargs="+", metavar="MODEL", help="such as llama3.2-1b, or a config.json of Hugging Face"
    )
    plan.add_argument("--chip", nargs="+", default=["v5e-1"], help=f"{', '.join(CHIPS)}, or all; default v5e-1")
    plan.add_argument("--tokens", type=int, help="of one sequence; without it, the longest context that fits")
    plan.add_argument("--batch", type=int, default=1, help="sequences of one step, over all chips; default 1")
    plan.add_argument("--param-dtype", default="bfloat16", help="of weights and moments; default bfloat16")
    plan.add_argument("--host-gib", type=float, help="the host's memory: weights may wait there, with --tokens")
    plan.add_argument("--estimate", action="store_true", help="trust the estimate; ask no compiler")
    plan.add_argument("--json", action="store_true", help="machine-readable, on standard output")
    given = parser.parse_args(arguments)
    try:
        configs = {name: _config(name, given.param_dtype) for name in given.models}
        chips = list(CHIPS) if given.chip == ["all"] else given.chip
        if unknown := [name for name in chips if name not in CHIPS]:
            raise ValueError(f"no chip is called {unknown[0]!r}. Known: {', '.join(CHIPS)}, all.")
        rows = [_answer(model, config, chip, given) for model, config in configs.items() for chip in chips]
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(rows, indent=2) if given.json else _table(rows))
    return FITS if all(row["fits"] for row in rows) else NOTHING_FITS


def _config(name: str, param_dtype: str) -> LlamaConfig:
    types = {"param_dtype": jnp.dtype(param_dtype), "compute_dtype": jnp.bfloat16}
    return LlamaConfig.from_hf(name, **types) if name.endswith(".json") else LlamaConfig.from_name(name, **types)


def _answer(model: str, config: LlamaConfig, chip: str, given: argparse.Namespace) -> dict[str, Any]:
    """What was found for one model on one chip, as JSON has it."""
    shared = {"compiler": not given.estimate, "progress": _say}
    host = None if given.host_gib is None else int(given.host_gib * GiB)
    search: Callable[[], Found] = (
        (lambda: longest_context(config, chip, batch_size=given.batch, **shared))
        if given.tokens is None
        else (lambda: find_plan(config, chip, seq_len=given.tokens, batch_size=given.batch, host_bytes=host, **shared))
    )
    row: dict[str, Any] = {"model": model, "chip": chip, "batch_size": given.batch, "seq_len": given.tokens}
    try:
        found = search()
    except NothingFits as error:
        return row | {"fits": False, "why": str(error)}
    peak = found.report.peak_bytes if found.report else found.estimate.peak_bytes
    return row | {
        "fits": True,
        "seq_len": found.seq_len,
        "peak_bytes": peak,
        "compiled": found.report is not None,
        "capacity_bytes": found.estimate.capacity_bytes,
        "estimated_bytes": found.estimate.peak_bytes,
        "host_bytes": found.estimate.host_bytes,
        "estimated_seconds": round(found.estimate.seconds.total, 4),
        "plan": {field.name: _plain(getattr(found.plan, field.name)) for field in dataclasses.fields(found.plan)},
        "plan_in_words": words(found.plan),
        "why": found.why,
        "alternatives": [
            {
                "plan": words(e.plan),
                "estimated_bytes": e.peak_bytes,
                "host_bytes": e.host_bytes,
                "estimated_seconds": round(e.seconds.total, 4),
            }
            for e in found.alternatives
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, MeshShape):
        return value.axes
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [_HEAD]
    for row in rows:
        length = f"{row['batch_size']} x {row['seq_len']:,}" if row["seq_len"] else "any"
        if not row["fits"]:
            cells.append((row["model"], row["chip"], length, "nothing fits", "", "", "", ""))
            continue
        sizes = (row["peak_bytes"], row["capacity_bytes"], row["host_bytes"])
        seconds = f"{row['estimated_seconds']:.2f}"
        shown = (f"{size / GiB:.2f}" for size in sizes)
        cells.append((row["model"], row["chip"], length, *shown, seconds, row["plan_in_words"]))
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, 1, 7) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
