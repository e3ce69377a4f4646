"""What every host of a run executes: joins the others, then one `train` call. The templates beside this start it.

    python scale/train.py --preset llama3.1-8b --mesh fsdp=32 --batch-size 64 --seq-len 8192 --output /shared/runs/one

    python -m llamem plan llama3.1-8b --chip v5e-8 --batch 8 --tokens 8192 --save plan.json
    python scale/train.py --plan plan.json --output run

The same command once more goes on from the newest snapshot, on as many hosts as there are then. Exit status: 0 when
the run is finished, 2 when what was asked for is refused, 75 when it was interrupted and has saved, 1 for the rest.
"""

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from llamem.train import hosts

hosts.initialize()

import jax
import jax.numpy as jnp

import llamem
from llamem.files import config_from_hf
from llamem.llama.plan import read_plan
from llamem.runs import train
from llamem.text import Tokenizer
from llamem.train import load_chats, load_corpus

REFUSED, INTERRUPTED = 2, 75
IN_THE_WAY = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)


def main() -> int:
    given = arguments()
    sizes = dict(part.split("=") for part in given.mesh.split(",") if part)
    mesh = {axis: int(size) for axis, size in sizes.items()}
    plan = given.found or llamem.Plan(mesh=mesh or {"fsdp": jax.device_count()})
    if mesh:
        plan = plan.replace(mesh=mesh)
    types = {"compute_dtype": jnp.dtype(given.compute_dtype or given.dtype)}
    settings = llamem.TrainSettings(
        **{name: getattr(given, name) for name in llamem.TrainSettings.__dataclass_fields__}
    )
    tokenizer = None
    if given.init and Path(given.init).exists():
        # A run that goes on tomorrow reads the same tokens: for templates that write the day it is always this one.
        tokenizer = Tokenizer(given.init, today=datetime.date(2024, 7, 26))
    corpus = load_chats(given.chats, tokenizer) if given.chats else load_corpus(given.corpus, tokenizer)
    init, lora = None, None
    if given.lora:
        targets = {"target_modules": tuple(given.targets)} if given.targets else {}
        lora = llamem.LoraConfig(tuple(given.lora), tuple(given.alpha) if given.alpha else None, **targets)
    if given.init:
        own_blocks = lora is not None and given.init.endswith(".gguf")  # a file's blocks stay under adapters
        stored = {"dtype": None if own_blocks else jnp.dtype(given.dtype), "quantize": given.quantize or None}
        init = llamem.load_pretrained(given.init, **stored, **types, plan=plan)
        config = init.config
    elif given.preset.endswith(".json"):
        config = config_from_hf(given.preset).replace(param_dtype=jnp.dtype(given.dtype), **types)
    else:
        config = llamem.LlamaConfig.from_name(given.preset, param_dtype=jnp.dtype(given.dtype), **types)
    run = train(config, corpus, settings, given.output, plan=plan, init=init, lora=lora, on_change=given.on_change)
    if given.save and run.finished and jax.process_index() == 0:
        run.save(given.save, tokenizer, base=given.init)
    if given.report and run.finished and jax.process_index() == 0:
        report = Path(__file__).with_name("report.ipynb")
        papermill = [sys.executable, "-m", "papermill", str(report), str(given.output / "report.ipynb")]
        subprocess.run([*papermill, "--parameters", "output_dir", str(given.output.resolve())], check=True)
    return 0 if run.finished else INTERRUPTED


def arguments() -> argparse.Namespace:
    """Return what was asked for; with --plan what stands in that file, unless it is said here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", required=True, type=Path, help="a folder that all hosts see")
    add("--plan", default="", help="a file of `python -m llamem plan --save`: plan, model, sizes, types, adapters")
    add("--preset", default="tiny", help="a name from llamem.PRESETS, or a config.json of Hugging Face")
    add("--mesh", default="", help="axes and sizes, fsdp=16,tensor=4; default: the plan's, or fsdp over all devices")
    add("--init", default="", help="folder, .gguf or hub name of a model, in place of --preset")
    add("--lora", type=int, nargs="+", metavar="RANK", help="train adapters of these ranks over the weights of --init")
    add("--alpha", type=float, nargs="+", help="of each adapter; default its rank")
    add("--targets", nargs="+", help="what adapters adapt, such as q v; default the seven matrices of a layer")
    add("--quantize", help="the frozen layers under adapters: q4_0, q4_1, q8_0; '' leaves them")
    add("--corpus", default="python-standard-library", help="as llamem.train.load_corpus reads it")
    add("--chats", default="", help="a JSONL file of chats, in place of --corpus")
    add("--save", default="", help="the first host writes what was trained there, for Hugging Face")
    add("--dtype", default="bfloat16", help="of parameters and moments")
    add("--compute-dtype", default="", help="of products; default that of parameters")
    add("--on-change", default="refuse", choices=("refuse", "continue"), help="of settings, as train's")
    add("--report", action="store_true", help="the first host writes OUTPUT/report.ipynb, by papermill")
    for name, field in llamem.TrainSettings.__dataclass_fields__.items():
        add(f"--{name.replace('_', '-')}", type=type(field.default), default=field.default)

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--plan", default="")
    file, found = first.parse_known_args()[0].plan, None
    if file:
        found, beside = read_plan(file)
        lora = beside.get("lora") or {}
        beside |= {"preset": beside.get("model") or "tiny", "dtype": beside.get("param_dtype", "bfloat16")}
        beside |= {"lora": lora.get("ranks"), "alpha": lora.get("alphas"), "targets": lora.get("target_modules")}
        parser.set_defaults(**beside)
    parser.set_defaults(found=found)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        # A full disk, a lost host or a folder that another process holds may be well at the next start.
        passing = isinstance(error, OSError) and not isinstance(error, IN_THE_WAY)
        sys.exit(1 if passing else REFUSED)
