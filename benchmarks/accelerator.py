"""What the course says of accelerators, tried on the GPU, TPU or CPU at hand: `make accelerator`.

    python benchmarks/accelerator.py                         # all four parts; writes accelerator_DEVICE.md and .png
    python benchmarks/accelerator.py --parts peaks losses    # some of them
    python benchmarks/accelerator.py --predict h100          # the same peaks for a chip that is not there, as JSON
    python benchmarks/accelerator.py --predicted peaks.json  # on that chip: what another machine predicted, beside it

peaks      what the compiler says a program needs, and what the device's allocator then counts; the training step's
           tokens/s and share of the chip's peak FLOP/s (MFU) with neither feature, each and both
losses     time and memory of the loss and its gradients, beside optax and those of tokamax, PyTorch, torch.compile,
           Liger and cut-cross-entropy that are installed
tests      those marked `accelerator`, with exact products of float32
notebooks  each as a test of nbval, from a fresh kernel with its parameters as they stand, so at the sizes of
           preset="auto"; every cell must run

Every program runs in a process of its own: an allocator's peak is that of its whole life. On a CPU the sizes are small,
so that this can always be tried; there the operating system counts, and rounds up. Ends with 1 where a test or a
notebook failed.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import loss
import numpy as np
from accelerator_programs import Program, programs
from measured import measure

import jaxmem
from jaxmem import GiB

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = ("peaks", "losses", "tests", "notebooks")
Row = dict[str, Any]


def arrays(shapes: Any) -> Any:
    """Random arrays of these shapes: what a chip multiplies faster when it is zero must not be."""
    leaves, tree = jax.tree.flatten(shapes)

    def array(i: int, leaf: Any) -> Any:
        key = jax.random.key(i)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(key, leaf.shape, 0, 1000, leaf.dtype) if leaf.shape else jnp.zeros((), leaf.dtype)
        return (0.02 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return jax.tree.unflatten(tree, [array(i, leaf) for i, leaf in enumerate(leaves)])


def seconds_of(program: Program, rounds: int = 5) -> float:
    """The median of some calls after the first. A donated first argument is replaced by the first result."""
    compiled = jax.jit(program.fn, donate_argnums=program.donate_argnums).lower(*program.shapes).compile()
    args, taken = list(arrays(program.shapes)), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(*args))
        taken.append(time.perf_counter() - start)
        if program.donate_argnums:
            args[0] = out[0]
    return statistics.median(taken[1:])


def one(program: Program, predicted: int | None) -> Row:
    """What was predicted and what was counted, in bytes and seconds, of one program in this process."""
    report = jaxmem.compile_report(program.fn, *program.shapes, donate_argnums=program.donate_argnums)
    row: Row = {"program": program.name, "predicted": report.peak_bytes, "elsewhere": predicted}
    if not report.fits:
        return row | {"error": "does not fit"}
    count = measure(program.fn, *arrays(program.shapes), donate_argnums=program.donate_argnums)
    # What was in use before is the arguments, and on a CPU the whole process: so only the rise counts.
    row |= {"measured": report.argument_bytes + count.rise_bytes, "exact": count.exact, "counted_by": count.counted_by}
    if program.flops:
        row |= {"seconds": seconds_of(program), "flops": program.flops, "tokens": program.tokens}
    return row


def compared_losses(small: bool) -> list[Row]:
    """The losses of `loss.py` in one process: on an accelerator at the shapes of Llama 3 8B."""
    tokens, width, dtype = (256, 64, "float32") if small else (4096, 4096, "bfloat16")
    return loss.measure_times([tokens], width, [dtype], rounds=5)


def child(what: str, predicted: Path | None) -> Any:
    """What a process of its own found: the device and the programs' names, a program's row, or the losses' rows."""
    command = [sys.executable, __file__, "--child", what, *(["--predicted", str(predicted)] if predicted else [])]
    # PyTorch wants memory of the same GPU: JAX takes what it needs when it needs it.
    shared = os.environ | ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if what == "losses" else {})
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=shared)
    if run.returncode:
        raise RuntimeError((run.stderr.strip().splitlines() or ["no message"])[-1][:200])
    return json.loads(run.stdout.splitlines()[-1])


def as_child(what: str, predicted: Path | None) -> Any:
    """What `child` asks for, found in this process."""
    here = jax.local_devices()[0]
    small = here.platform == "cpu"
    if what == "losses":
        return compared_losses(small)
    chosen = programs(small)
    if what in chosen:
        return one(chosen[what], json.loads(predicted.read_text()).get(what) if predicted else None)
    return [here.platform, here.device_kind, list(chosen)]


def peaks_table(rows: list[Row], peak_flops: float | None) -> str:
    lines = [
        "| program | predicted here, GiB | predicted without the chip | counted | prediction / count "
        "| ms | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["program"], f"{row['predicted'] / GiB:.3f}" if "predicted" in row else ""]
        cells.append(f"{row['elsewhere'] / GiB:.3f}" if row.get("elsewhere") else "")
        if "measured" in row:
            ratios = [row[name] / row["measured"] for name in ("predicted", "elsewhere") if row.get(name)]
            cells += [f"{row['measured'] / GiB:.3f}", ", ".join(f"{ratio:.3f}" for ratio in ratios)]
        else:
            cells += [row.get("error", "did not run"), ""]
        if "seconds" in row:
            mfu = f"{row['flops'] / row['seconds'] / peak_flops:.2f}" if peak_flops else ""
            cells += [f"{1e3 * row['seconds']:.1f}", f"{row['tokens'] / row['seconds']:,.0f}", mfu]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peaks_part(names: list[str], predicted: Path | None) -> list[Row]:
    """A row for each program; what fails is a row, too."""
    rows: list[Row] = []
    for name in names:
        try:
            rows.append(child(name, predicted))
        except RuntimeError as error:
            rows.append({"program": name, "error": str(error)})
        print(rows[-1], flush=True)
    return rows


def peaks_text(rows: list[Row], device: str) -> list[str]:
    peak_flops = next((chip.peak_flops for chip in jaxmem.CHIPS.values() if chip.device_kind == device), None)
    ratios = [row["predicted"] / row["measured"] for row in rows if "measured" in row]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}, median {np.median(ratios):.3f}" if ratios else "none"
    said = f"Prediction over count, {len(ratios)} of {len(rows)} programs: {spread}. Counted by: "
    said += ", ".join(sorted({row["counted_by"] for row in rows if "measured" in row})) + "."
    return ["## Predicted and counted peaks", said, peaks_table(rows, peak_flops)]


def losses_text(rows: list[Row]) -> list[str]:
    seconds = {row["loss"]: row["seconds"] for row in rows}
    ratio = seconds["llamem, auto"] / seconds["the three products alone"]
    said = (
        f"`llamem, auto` takes {ratio:.2f} of the time of its three products. In parentheses: as a fraction of plain "
    )
    said += "logits in the same rounds. Then the peak: JAX's as compiled, PyTorch's as its allocator counts."
    return ["## The loss and both gradients", said, loss.table(rows, "dtype", loss.time_cell)]


def tests_text() -> tuple[list[str], bool]:
    """pytest's own last lines: what failed, and how many passed; and whether all did."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "accelerator", "tests"]
    # Empty: tests/conftest.py would ask for programs that compile fast. And accelerators round float32 products.
    exact = os.environ | {"XLA_FLAGS": "", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=exact)
    lines = run.stdout.strip().splitlines() or [run.stderr.strip()[-200:]]
    told = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[-1:]
    return ["## Tests marked `accelerator`", "```text\n" + "\n".join(told) + "\n```"], run.returncode == 0


def notebooks_text(numbers: list[str]) -> tuple[list[str], bool]:
    """A line for each notebook, its seconds and how it ended as a test of nbval; and whether all passed.

    Stored text belongs to the locked versions on a CPU, so here every cell must only run, in a copy that says so.
    """
    lines, all_ran = ["| notebook | seconds | |", "|---|---|---|"], True
    with tempfile.TemporaryDirectory() as folder:
        copies = shutil.copytree(ROOT / "notebooks", Path(folder) / "notebooks")
        for path in sorted(copies.glob("[0-9][0-9]_*.ipynb")):
            if numbers and path.name[:2] not in numbers:
                continue
            stored = path.read_text(encoding="utf-8")
            path.write_text(stored.replace('"nbval-check-output"', '"nbval-only-run"'), encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-current-env", "-p", "no:python"]
            command += ["--nbval-cell-timeout=3600", "-p", "no:cacheprovider", path]
            start = time.monotonic()
            run = subprocess.run(command, cwd=copies, capture_output=True, text=True, check=False)
            said = run.stdout.strip().splitlines() or [run.stderr.strip()[-200:] or "no message"]
            told = [line for line in said if line.startswith(("FAILED", "ERROR"))][:1] + said[-1:]
            all_ran &= run.returncode == 0
            lines.append(f"| {path.stem} | {time.monotonic() - start:.0f} | {'; '.join(told)[:200]} |")
            print(lines[-1], flush=True)
    return ["## Notebooks", "\n".join(lines)], all_ran


def figure(peaks: list[Row], losses: list[Row], device: str, file: Path) -> None:
    """Left: prediction over count of each program, with a band of 3 %. Right: milliseconds of each loss."""
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 0.28 * max(len(peaks), len(losses)) + 1.5), layout="tight")
    measured = [row for row in peaks if "measured" in row]
    left.axvspan(0.97, 1.03, color="#dddddd")
    left.plot([row["predicted"] / row["measured"] for row in measured], [row["program"] for row in measured], "o")
    left.set(title=f"predicted over counted peak, {device}", xlabel="ratio; the band is 3 %")
    ran = [row for row in losses if np.isfinite(row["seconds"])]
    right.barh([row["loss"] for row in ran], [1e3 * row["seconds"] for row in ran])
    right.set(title="loss and both gradients", xlabel="milliseconds")
    for ax in (left, right):
        ax.invert_yaxis()
    fig.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", default="", help="of the peaks: programs whose name contains this")
    parser.add_argument("--notebooks", nargs="+", default=[], help="of the notebooks: these numbers")
    parser.add_argument("--predict", metavar="CHIP", help="print peaks for this absent chip as JSON, and run nothing")
    parser.add_argument("--predicted", type=Path, help="such a file, to be put beside what is measured")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE, help="the folder to write to")
    args = parser.parse_args()
    if args.predict:
        found = {}
        for name, program in programs(small=False).items():
            if args.only in name:
                report = jaxmem.compile_report(
                    program.fn, *program.shapes, donate_argnums=program.donate_argnums, chip=args.predict
                )
                found[name] = report.peak_bytes
        print(json.dumps(found, indent=1))
        return
    if args.child:
        print(json.dumps(as_child(args.child, args.predicted)))
        return
    # This process touches no device: a TPU belongs to one process at a time, and a GPU's memory is taken beforehand.
    platform, device, names = child("which", args.predicted)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "optax"))
    small = " The sizes are the small ones for CPUs." if platform == "cpu" else ""
    text = [
        f"# Tried on {device}",
        f"{datetime.date.today()}, {versions}{loss.peers()}. By `benchmarks/accelerator.py`.{small}",
    ]
    peaks: list[Row] = []
    losses: list[Row] = []
    if "peaks" in args.parts:
        peaks = peaks_part([name for name in names if args.only in name], args.predicted)
        text += peaks_text(peaks, device)
    if "losses" in args.parts:
        try:
            losses = child("losses", None)
            text += losses_text(losses)
        except RuntimeError as error:
            text += ["## The loss and both gradients", f"did not run: {error}"]
    passed = ran = True
    if "tests" in args.parts:
        told, passed = tests_text()
        text += told
    if "notebooks" in args.parts:
        told, ran = notebooks_text(args.notebooks)
        text += told
    name = f"accelerator_{device.lower().replace(' ', '-')}"
    if peaks or losses:
        figure(peaks, losses, device, args.out / f"{name}.png")
        text.append(f"![Prediction over count of each program, and the time of each loss]({name}.png)")
    (args.out / f"{name}.md").write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))
    sys.exit(not (passed and ran))


if __name__ == "__main__":
    main()
