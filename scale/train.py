"""What every host of a run executes: joins the others, then one `train` call. The templates beside this start it.

    python scale/train.py --preset llama3.1-8b --mesh fsdp=32 --batch-size 64 --seq-len 8192 --output /shared/runs/one

The same command once more goes on from the newest snapshot, on as many hosts as there are then.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from llamem.train import hosts

hosts.initialise()

import jax
import jax.numpy as jnp

import llamem
from llamem.train import load_corpus, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="a folder that all hosts see")
    parser.add_argument("--preset", default="tiny", help="a name from llamem.PRESETS")
    parser.add_argument("--mesh", default="", help="axes and sizes, fsdp=16,tensor=4; default: fsdp over all devices")
    parser.add_argument("--corpus", default="python-standard-library", help="as llamem.train.load_corpus reads it")
    parser.add_argument("--dtype", default="bfloat16", help="of parameters, moments and products")
    parser.add_argument("--report", action="store_true", help="the first host writes OUTPUT/report.ipynb, by papermill")
    for name, field in llamem.TrainSettings.__dataclass_fields__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = parser.parse_args()

    sizes = dict(part.split("=") for part in given.mesh.split(",") if part)
    mesh = {axis: int(size) for axis, size in sizes.items()} or {"fsdp": jax.device_count()}
    dtype = jnp.dtype(given.dtype)
    config = llamem.LlamaConfig.from_name(given.preset, param_dtype=dtype, compute_dtype=dtype)
    settings = llamem.TrainSettings(
        **{name: getattr(given, name) for name in llamem.TrainSettings.__dataclass_fields__}
    )
    run = train(config, load_corpus(given.corpus), settings, given.output, plan=llamem.Plan(mesh=mesh))
    if given.report and run.finished and jax.process_index() == 0:
        report = Path(__file__).with_name("report.ipynb")
        papermill = [sys.executable, "-m", "papermill", str(report), str(given.output / "report.ipynb")]
        subprocess.run([*papermill, "--parameters", "output_dir", str(given.output.resolve())], check=True)


if __name__ == "__main__":
    main()
