"""`python -m llamem plan llama3.2-1b --chip v5e-1 --tokens 131072`: the planner for a shell, as a table or as JSON."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax.numpy as jnp

from llamem.llama import LlamaConfig, LoraConfig, MeshShape, config_from_hf
from llamem.memory import CHIPS, Chip, GiB
from llamem.memory.show import Table
from llamem.planner.asking import NothingFits
from llamem.planner.question import chip_called
from llamem.planner.search import Found, find_plan, longest_context

FITS, NOTHING_FITS, BAD_INPUT = 0, 1, 2
_HEAD = ("model", "chip", "batch x tokens", "GiB", "of", "host GiB", "s a step, estimated", "tokens/s", "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is found; return 0 where every question has a plan, 1 where one has none, 2 for bad input."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return FITS
    try:
        configs = {name: _config(name) for name in given.models}
        chips = [chip_called(name) for name in (_all(given.quantize) if given.chip == ["all"] else given.chip)]
        stored = None if given.param_dtype is None else jnp.dtype(given.param_dtype)
        lora = None if given.lora is None else LoraConfig(ranks=tuple(given.lora))
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    rows = [
        _answer(model, config.replace(**_types(chip, lora, stored)), chip.name, lora, given)
        for model, config in configs.items()
        for chip in chips
    ]
    for row in rows:
        if row["status"] == BAD_INPUT:
            print(f"error: {row['model']} on {row['chip']}: {row['why']}", file=sys.stderr)
    print(json.dumps(rows, indent=2) if given.json else _table(rows))
    if not given.json:
        for row in (row for row in rows if row["fits"]):
            print(f"\n{row['model']} on {row['chip']}: {row['why']}\n{row['code']}")
    return max(row["status"] for row in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llamem", description="Llama 3 in less memory.")
    parser.add_argument("--version", action="version", version=f"llamem {metadata.version('llamem')}")
    plan = parser.add_subparsers(dest="command").add_parser(
        "plan",
        help="find how to train a model on a chip",
        description="Finds the fastest plan, by estimate, that a chip's compiler accepts for one AdamW step.",
        epilog="Exit status: 0 it fits, 1 nothing fits, 2 bad input.",
    )
    plan.add_argument(
        "models", nargs="+", metavar="MODEL", help="such as llama3.2-1b, or a config.json of Hugging Face"
    )
    chips = f"{', '.join(CHIPS)}, a slice such as v5p:4x4x4, local, or all; default v5e-1"
    plan.add_argument("--chip", nargs="+", default=["v5e-1"], help=chips)
    plan.add_argument("--tokens", type=int, help="of one sequence; without it, the longest context that fits")
    plan.add_argument("--batch", type=int, default=1, help="sequences of one step, over all chips; default 1")
    plan.add_argument(
        "--lora", nargs="+", type=int, metavar="RANK", help="train adapters of these ranks, not the model"
    )
    plan.add_argument("--quantize", metavar="KIND", help="of the frozen layers under adapters: q4_0, q4_1 or q8_0")
    types = "of weights, and of their moments; default bfloat16 (under adapters float16 on chips without bfloat16)"
    plan.add_argument("--param-dtype", help=types)
    plan.add_argument("--host-gib", type=_gib, help="what the host can hold of a run: weights may wait there")
    plan.add_argument(
        "--clip", choices=("global", "layer"), default="global", help="gradients by the norm of all, or layer by layer"
    )
    plan.add_argument("--estimate", action="store_true", help="trust the estimate; ask no compiler")
    plan.add_argument("--json", action="store_true", help="machine-readable, on standard output")
    return parser


def _gib(text: str) -> int:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of GiB, at least 0")
    return int(value * GiB)


def _config(name: str) -> LlamaConfig:
    return config_from_hf(name) if name.endswith(".json") else LlamaConfig.from_name(name)


def _all(quantize: str | None) -> list[str]:
    """Return the names of all chips; of single ones for blocks, which are not split."""
    return [name for name, chip in CHIPS.items() if quantize is None or chip.devices == 1]


def _types(chip: Chip, lora: LoraConfig | None, stored: Any) -> dict[str, Any]:
    """Return the types of weights and products: of 16 bits, which the chip has units for where the model is frozen."""
    products = jnp.bfloat16 if lora is None or chip.has_bf16 else jnp.float16
    return {"param_dtype": stored or products, "compute_dtype": products}


def _answer(
    model: str, config: LlamaConfig, chip: str, lora: LoraConfig | None, given: argparse.Namespace
) -> dict[str, Any]:
    """Return what was found for one model on one chip, as JSON has it. What cannot be asked is a row as well."""
    how: dict[str, Any] = {
        "batch_size": given.batch,
        "compiler": not given.estimate,
        "progress": _tell,
        "host_bytes": given.host_gib,
        "clip": given.clip,
        "lora": lora,
        "quantize": given.quantize,
    }
    row: dict[str, Any] = {"model": model, "chip": chip, "batch_size": given.batch, "seq_len": given.tokens}
    try:
        if given.tokens is None:
            found = longest_context(config, chip, **how)
        else:
            found = find_plan(config, chip, seq_len=given.tokens, **how)
    except NothingFits as error:
        return row | {"status": NOTHING_FITS, "fits": False, "why": str(error)}
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        return row | {"status": BAD_INPUT, "fits": False, "why": str(error)}
    return row | {"status": FITS, "fits": True, "seq_len": found.seq_len} | _described(found)


def _described(found: Found) -> dict[str, Any]:
    one = found.estimate
    return {
        "peak_bytes": found.peak_bytes,
        "compiled": found.report is not None,
        "capacity_bytes": one.capacity_bytes,
        "estimated_bytes": one.peak_bytes,
        "host_bytes": one.host_bytes,
        "estimated_seconds": round(one.seconds.total, 4),
        "tokens_per_second": round(one.tokens_per_second, 1),
        "plan": {field.name: _plain(getattr(found.plan, field.name)) for field in dataclasses.fields(found.plan)},
        "plan_in_words": repr(found.plan),
        "why": found.why,
        "code": found.code,
        "alternatives": [
            {
                "plan": repr(e.plan),
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


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    verdicts = {NOTHING_FITS: "nothing fits", BAD_INPUT: "cannot be"}
    cells: list[tuple[str, ...]] = []
    for row in rows:
        length = f"{row['batch_size']} x {row['seq_len']:,}" if row["seq_len"] else "any"
        start = (row["model"], row["chip"], length)
        if not row["fits"]:
            cells.append((*start, "", "", "", "", "", verdicts[row["status"]]))
            continue
        sizes = (row["peak_bytes"], row["capacity_bytes"] or 0, row["host_bytes"])
        shown = (f"{size / GiB:.2f}" for size in sizes)
        speed = f"{row['estimated_seconds']:.2f}", f"{row['tokens_per_second']:,.0f}"
        cells.append((*start, *shown, *speed, row["plan_in_words"]))
    return Table(_HEAD, cells)
