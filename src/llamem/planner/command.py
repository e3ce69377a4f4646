"""`python -m llamem plan llama3.2-1b --chip v5e-1 --tokens 131072`: the planner for a shell."""

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxmem.chips.chip import CHIPS
from jaxmem.chips.names import chip_called
from jaxmem.common.printing import Table
from jaxmem.fitting import NothingFits
from jaxmem.report import GiB
from llamem.adapters.lora import LoraConfig
from llamem.files.hf_config import config_from_hf
from llamem.llama.config import PRESETS, LlamaConfig
from llamem.planner.grid import MODELS, PLACES, TOKENS, WAYS, check, fill, questions_of
from llamem.planner.result import SPEEDS, speeds_shown
from llamem.planner.search import Found, find_plan, longest_context
from llamem.planner.sizes import usual_types

FITS, NOTHING_FITS, BAD_INPUT = 0, 1, 2
_HEAD = ("model", "chip", "batch x tokens", "GiB", "of", "host GiB", *SPEEDS, "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is found; return 0 where every question has a plan, 1 where one has none, 2 for bad input."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return FITS
    if given.command == "table":
        return _table(given)
    if given.chip == ["all"]:  # of single ones for blocks, which are not split
        given.chip = [name for name, chip in CHIPS.items() if given.quantize is None or chip.devices == 1]
    short = {chip: f"{chip.lower()}-1" for chip in given.chip if f"{chip.lower()}-1" in CHIPS}
    given.chip = [short.get(chip, chip) for chip in given.chip]
    if given.save and (len(given.models), len(given.chip)) != (1, 1):
        print("--save: one plan stands in a file. Ask of one model and one chip.", file=sys.stderr)
        return BAD_INPUT
    status, rows, texts = FITS, [], [f"{chip} is taken for {single}, one chip." for chip, single in short.items()]
    for model in given.models:
        for chip in given.chip:
            try:
                result = _find(model, chip, given)
                rows.append((model, chip, *_cells(result)))
                texts.append(f"\n{model} on {chip}: {result.why}\n\n{_program(model, result)}")
                if given.save:
                    file = result.save(given.save, model)
                    own = " --init MODEL --chats CHATS.jsonl" if given.lora else ""  # adapters need weights
                    texts.append(f"\nThe plan is in {file}: python scale/train.py --plan {file}{own} --output FOLDER")
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


def _table(given: argparse.Namespace) -> int:
    """Fill a file with a grid's answers, or ask some of its rows again; return 1 where one of these moved."""

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        if given.check:
            return NOTHING_FITS if check(given.out, given.check, given.seed, say) else FITS
        unknown = [name for name in given.models if name not in PRESETS]
        if unknown:
            raise ValueError(f"no model of the table is called {unknown[0]!r}. There are: {', '.join(PRESETS)}.")
        fill(given.out, questions_of(given.models, given.ways, given.chip, given.tokens), say)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    return FITS


def _find(model: str, chip: str, given: argparse.Namespace) -> Found:
    """Return what is found for a model, its weights in 16 bits that the chip has units for where they are frozen."""
    if given.host_gib is not None and not 0 <= given.host_gib < math.inf:
        raise ValueError(f"--host-gib {given.host_gib:g}: expected the GiB of memory that the host has, 0 or more.")
    lora = LoraConfig(ranks=tuple(given.lora)) if given.lora else None
    types = usual_types(chip_called(chip), lora)
    if given.param_dtype:
        types["param_dtype"] = given.param_dtype
    config = config_from_hf(model) if model.endswith(".json") else LlamaConfig.from_name(model)
    options: dict[str, Any] = {name: getattr(given, name) for name in ("batch_size", "clip", "quantize")}
    options["host_bytes"] = None if given.host_gib is None else int(given.host_gib * GiB)
    options |= {"lora": lora, "compiler": not given.estimate, "progress": lambda line: print(line, file=sys.stderr)}
    if given.tokens is None:
        return longest_context(config.replace(**types), chip, **options)
    return find_plan(config.replace(**types), chip, seq_len=given.tokens, **options)


def _program(model: str, result: Found) -> str:
    """Return a program that trains with what was found; of the reader's own are only the names of files."""
    if result.estimate.question.lora is not None:
        return f"import llamem\n\n{result.code}"  # the model comes with its weights
    config = result.estimate.question.config
    types = f"param_dtype={config.param_dtype.name!r}, compute_dtype={config.compute_dtype.name!r}"
    made_by = "llamem.files.config_from_hf" if model.endswith(".json") else "llamem.LlamaConfig.from_name"
    return f"import llamem\n\nconfig = {made_by}({model!r}, {types})\n{result.code}"


def _tokens(text: str) -> int:
    """Return the number that is written, "8192", "8,192" or "8k": thousands and millions are those of memory."""
    plain = text.lower().replace(",", "").replace("_", "")
    number, unit = (plain[:-1], {"k": 2**10, "m": 2**20}[plain[-1]]) if plain[-1:] in ("k", "m") else (plain, 1)
    if not number.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: 8192, or 8k, which is as many.")
    return int(number) * unit


def _cells(result: Found) -> tuple[str, ...]:
    e = result.estimate
    sizes = (f"{size / GiB:.2f}" for size in (result.peak_bytes, e.capacity_bytes or 0, e.host_bytes))
    compiled_as = "; GiB are of attention='tiled'" if e.question.stands_in(result.plan) else ""
    return f"{e.question.batch_size} x {result.seq_len:,}", *sizes, *speeds_shown(e), f"{result.plan!r}{compiled_as}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llamem", description="Llama 3 in less memory.")
    parser.add_argument("--version", action="version", version=f"llamem {metadata.version('llamem')}")
    commands = parser.add_subparsers(dest="command")
    plan = commands.add_parser(
        "plan",
        help="find how to train a model on a chip",
        description="Finds the fastest plan, by estimate, that a chip's compiler accepts for one AdamW step.",
        epilog="Exit status: 0 it fits, 1 nothing fits, 2 bad input.",
    )
    add = plan.add_argument
    add("models", nargs="+", metavar="MODEL", help="such as llama3.2-1b, or a config.json of Hugging Face")
    chips = f"{', '.join(CHIPS)}, a slice such as v5p:4x4x4, local, or all; default v5e-1"
    add("--chip", nargs="+", default=["v5e-1"], help=chips)
    tokens = "of one sequence, such as 8192 or 8k, which is as many; without it, the longest context that fits"
    add("--tokens", type=_tokens, help=tokens)
    add("--batch", dest="batch_size", type=int, default=1, help="sequences of one step, over all chips; default 1")
    add("--lora", nargs="+", type=int, metavar="RANK", help="train adapters of these ranks, not the model")
    add("--quantize", metavar="KIND", help="of the frozen layers under adapters: q4_0, q4_1 or q8_0")
    add(
        "--param-dtype",
        help="of weights, and of their moments; default bfloat16, of frozen ones float16 on a chip without",
    )
    gib = "GiB that the host can hold of a run: weights may wait there"
    add("--host-gib", type=float, metavar="GIB", help=gib)
    add("--clip", choices=("global", "layer"), default="global", help="gradients by the norm of all, or by layer")
    add("--save", metavar="FILE", help="write the plan as JSON, for scale/train.py --plan and llamem.Plan.load")
    add("--estimate", action="store_true", help="trust the estimate; ask no compiler")
    table = commands.add_parser(
        "table",
        help="ask a grid of models, chips and lengths",
        description="Asks the compilers of a grid of questions, and appends each answer to a file as a line of JSON. "
        "Stopped and started again, it goes on.",
        epilog="Exit status: 0 done, 1 an answer moved (--check), 2 bad input.",
    )
    add = table.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the file of rows")
    add("--models", nargs="+", default=MODELS, metavar="MODEL", help=f"default {', '.join(MODELS)}")
    add("--ways", nargs="+", default=[*WAYS], choices=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)}; default all")
    add("--chip", nargs="+", default=PLACES, metavar="CHIP", help=f"default {', '.join(PLACES)}")
    add("--tokens", nargs="+", type=_tokens, default=TOKENS, metavar="N", help="default 4k, 8k, 32k and 128k")
    add("--check", type=int, metavar="ROWS", help="ask so many of the file's rows again, drawn at random")
    add("--seed", type=int, default=0, help="of what is drawn")
    return parser
