"""What every host of a run executes: joins the others, then one `train` call. The templates beside this start it.

    python scale/train.py --preset llama3.1-8b --mesh fsdp=32 --batch-size 64 --seq-len 8192 --output /shared/runs/one

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
from llamem.runs import train
from llamem.text import Tokenizer
from llamem.train import load_chats, load_corpus

REFUSED, INTERRUPTED = 2, 75
IN_THE_WAY = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="a folder that all hosts see")
    parser.add_argument("--preset", default="tiny", help="a name from llamem.PRESETS")
    parser.add_argument("--mesh", default="", help="axes and sizes, fsdp=16,tensor=4; default: fsdp over all devices")
    parser.add_argument("--init", default="", help="folder, .gguf or hub name of a model, in place of --preset")
    parser.add_argument("--lora", type=int, default=0, help="train an adapter of this rank over the weights of --init")
    parser.add_argument("--corpus", default="python-standard-library", help="as llamem.train.load_corpus reads it")
    parser.add_argument("--chats", default="", help="a JSONL file of chats, in place of --corpus")
    parser.add_argument("--save", default="", help="the first host writes what was trained there, for Hugging Face")
    parser.add_argument("--dtype", default="bfloat16", help="of parameters, moments and products")
    parser.add_argument("--on-change", default="refuse", choices=("refuse", "continue"), help="of settings, as train's")
    parser.add_argument("--report", action="store_true", help="the first host writes OUTPUT/report.ipynb, by papermill")
    for name, field in llamem.TrainSettings.__dataclass_fields__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = parser.parse_args()

    sizes = dict(part.split("=") for part in given.mesh.split(",") if part)
    mesh = {axis: int(size) for axis, size in sizes.items()} or {"fsdp": jax.device_count()}
    dtype, plan = jnp.dtype(given.dtype), llamem.Plan(mesh=mesh)
    settings = llamem.TrainSettings(
        **{name: getattr(given, name) for name in llamem.TrainSettings.__dataclass_fields__}
    )
    tokenizer = None
    if given.init and Path(given.init).exists():
        # A run that goes on tomorrow reads the same tokens: for templates that write the day it is always this one.
        tokenizer = Tokenizer(given.init, today=datetime.date(2024, 7, 26))
    corpus = load_chats(given.chats, tokenizer) if given.chats else load_corpus(given.corpus, tokenizer)
    init, lora = None, llamem.LoraConfig(ranks=(given.lora,)) if given.lora else None
    if given.init:
        stored = None if lora and given.init.endswith(".gguf") else dtype  # a file's blocks stay under adapters
        init = llamem.load_pretrained(given.init, dtype=stored, compute_dtype=dtype, plan=plan)
        config = init.config
    else:
        config = llamem.LlamaConfig.from_name(given.preset, param_dtype=dtype, compute_dtype=dtype)
    run = train(config, corpus, settings, given.output, plan=plan, init=init, lora=lora, on_change=given.on_change)
    if given.save and run.finished and jax.process_index() == 0:
        run.save(given.save, tokenizer, base=given.init)
    if given.report and run.finished and jax.process_index() == 0:
        report = Path(__file__).with_name("report.ipynb")
        papermill = [sys.executable, "-m", "papermill", str(report), str(given.output / "report.ipynb")]
        subprocess.run([*papermill, "--parameters", "output_dir", str(given.output.resolve())], check=True)
    return 0 if run.finished else INTERRUPTED


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        # A full disk, a lost host or a folder that another process holds may be well at the next start.
        passing = isinstance(error, OSError) and not isinstance(error, IN_THE_WAY)
        sys.exit(1 if passing else REFUSED)
