"""`python -m llamem plan llama3.2-1b --chip v5e-1 --tokens 131072`: the planner for a shell."""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax.numpy as jnp

from llamem.adapters.lora import LoraConfig
from llamem.llama.config import LlamaConfig
from llamem.llama.hf_config import config_from_hf
from llamem.memory.chips import CHIPS
from llamem.memory.report import GiB
from llamem.memory.show import Table
from llamem.planner.fitting import NothingFits
from llamem.planner.found import SPEEDS, speeds_shown
from llamem.planner.search import Found, find_plan, longest_context
from llamem.planner.sizes import chip_called

FITS, NOTHING_FITS, BAD_INPUT = 0, 1, 2
_HEAD = ("model", "chip", "batch x tokens", "GiB", "of", "host GiB", *SPEEDS, "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is found; return 0 where every question has a plan, 1 where one has none, 2 for bad input."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return FITS
    if given.chip == ["all"]:  # of single ones for blocks, which are not split
        given.chip = [name for name, chip in CHIPS.items() if given.quantize is None or chip.devices == 1]
    status, rows, texts = FITS, [], []
    for model in given.models:
        for chip in given.chip:
            try:
                found = _find(model, chip, given)
                rows.append((model, chip, *_cells(found)))
                texts.append(f"\n{model} on {chip}: {found.why}\n{found.code}")
                continue
            except NothingFits as error:
                failed, why = NOTHING_FITS, error
            except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
                failed, why = BAD_INPUT, error
            status = max(status, failed)
            rows.append((model, chip, *[""] * 7, "nothing fits" if failed == NOTHING_FITS else "cannot be"))
            print(f"{model} on {chip}: {why}", file=sys.stderr)
    print(Table(_HEAD, rows), *texts, sep="\n")
    return status


def _find(model: str, chip: str, given: argparse.Namespace) -> Found:
    """Return what is found for a model, its weights in 16 bits that the chip has units for where they are frozen."""
    lora = LoraConfig(ranks=tuple(given.lora)) if given.lora else None
    products = jnp.bfloat16 if lora is None or chip_called(chip).has_bf16 else jnp.float16
    types = {"param_dtype": given.param_dtype or products, "compute_dtype": products}
    config = config_from_hf(model) if model.endswith(".json") else LlamaConfig.from_name(model)
    how: dict[str, Any] = {name: getattr(given, name) for name in ("batch_size", "host_bytes", "clip", "quantize")}
    how |= {"lora": lora, "compiler": not given.estimate, "progress": lambda line: print(line, file=sys.stderr)}
    if given.tokens is None:
        return longest_context(config.replace(**types), chip, **how)
    return find_plan(config.replace(**types), chip, seq_len=given.tokens, **how)


def _cells(found: Found) -> tuple[str, ...]:
    e = found.estimate
    sizes = (f"{size / GiB:.2f}" for size in (found.peak_bytes, e.capacity_bytes or 0, e.host_bytes))
    return f"{e.question.batch_size} x {found.seq_len:,}", *sizes, *speeds_shown(e), repr(found.plan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llamem", description="Llama 3 in less memory.")
    parser.add_argument("--version", action="version", version=f"llamem {metadata.version('llamem')}")
    plan = parser.add_subparsers(dest="command").add_parser(
        "plan",
        help="find how to train a model on a chip",
        description="Finds the fastest plan, by estimate, that a chip's compiler accepts for one AdamW step.",
        epilog="Exit status: 0 it fits, 1 nothing fits, 2 bad input.",
    )
    add = plan.add_argument
    add("models", nargs="+", metavar="MODEL", help="such as llama3.2-1b, or a config.json of Hugging Face")
    chips = f"{', '.join(CHIPS)}, a slice such as v5p:4x4x4, local, or all; default v5e-1"
    add("--chip", nargs="+", default=["v5e-1"], help=chips)
    add("--tokens", type=int, help="of one sequence; without it, the longest context that fits")
    add("--batch", dest="batch_size", type=int, default=1, help="sequences of one step, over all chips; default 1")
    add("--lora", nargs="+", type=int, metavar="RANK", help="train adapters of these ranks, not the model")
    add("--quantize", metavar="KIND", help="of the frozen layers under adapters: q4_0, q4_1 or q8_0")
    add("--param-dtype", help="of weights, and of their moments; default bfloat16, or float16 where a chip lacks it")
    gib = "GiB that the host can hold of a run: weights may wait there"
    add("--host-gib", dest="host_bytes", type=lambda text: float(text) * GiB, metavar="GIB", help=gib)
    add("--clip", choices=("global", "layer"), default="global", help="gradients by the norm of all, or by layer")
    add("--estimate", action="store_true", help="trust the estimate; ask no compiler")
    return parser
