"""The tiled losses against what else there is: seconds here, and compiled peaks for chips that need not be here.

    python benchmarks/loss.py                 # both; writes loss_times and loss_peaks, .md and .png
    python benchmarks/loss.py --part peaks    # compiled peaks alone
    python benchmarks/loss.py --tokens 1024 4096 16384 65536 --width 4096    # on an accelerator

Peers are used where they are installed: tokamax (JAX), PyTorch as it is and compiled, and on a CUDA machine Liger and
cut-cross-entropy, which have run for no published table yet.
All of them run in one process, one after the other in rounds, and the fastest round counts; the first one compiles.
What would not fit, as the compiler says, does not run.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from compilers_used import compilers_used

import jaxmem
import llamem
from jaxmem.report import GiB
from llamem_course.baseline import lean_loss

HERE = Path(__file__).resolve().parent
VOCAB = 128_256
Loss = Callable[[Any, Any, Any], Any]


def plain(x_ND: Any, head_VD: Any, targets_N: Any) -> Any:
    logits_NV = (x_ND @ head_VD.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_NV, targets_N).mean()


def mapped(x_ND: Any, head_VD: Any, targets_N: Any, num_tiles: int = 16) -> Any:
    tile = jax.checkpoint(lambda t: plain(t[0], head_VD, t[1]))
    return jax.lax.map(tile, (x_ND.reshape(num_tiles, -1, x_ND.shape[1]), targets_N.reshape(num_tiles, -1))).mean()


def jax_losses() -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "plain logits (optax)": plain,
        "logits in the inputs' type, no tiles": lean_loss,
        "lax.map + checkpoint, 16 tiles": mapped,
        "llamem, tokens, 16 tiles": partial(llamem.tiled_cross_entropy, axis="tokens", num_tiles=16),
        "llamem, vocabulary, 64 tiles": partial(llamem.tiled_cross_entropy, axis="vocab", num_tiles=64),
        "llamem, auto": llamem.tiled_cross_entropy,
    }
    if importlib.util.find_spec("tokamax"):
        import tokamax  # pyrefly: ignore[missing-import]

        def by_tokamax(x_ND: Any, head_VD: Any, targets_N: Any) -> Any:
            loss = tokamax.linear_softmax_cross_entropy_loss
            return loss(x_ND, targets_N, head_VD.T, reduction="mean", implementation=kernel)

        kernel = "mosaic_tpu" if jax.default_backend() == "tpu" else "xla"  # that kernel refuses other backends
        found[f"tokamax, {kernel}"] = by_tokamax
    return found


def problem(tokens: int, width: int, dtype: str) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    x_ND = jax.random.normal(keys[0], (tokens, width), dtype)
    head_VD = jax.random.normal(keys[1], (VOCAB, width), dtype) / width**0.5
    return x_ND, head_VD, jax.random.randint(keys[2], (tokens,), 0, VOCAB)


def products(x_ND: Any, head_VD: Any, targets_N: Any) -> Any:
    z_NV = x_ND @ head_VD.T
    return z_NV @ head_VD, z_NV.T @ x_ND


def timed(step: Loss, *arrays: Any) -> Any:
    return jax.block_until_ready(step(*arrays))


def jax_runs(arrays: tuple[Any, Any, Any]) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What to time, by name, and the compiled peaks in GiB; those too large for this machine are not to be run."""
    steps = {name: jax.value_and_grad(loss, argnums=(0, 1)) for name, loss in jax_losses().items()}
    steps["the three products alone"] = products
    runs, peaks = {}, {}
    for name, step in steps.items():
        report = jaxmem.compile_report(step, *arrays)
        peaks[name] = report.peak_bytes / GiB
        if report.peak_bytes < 0.8 * (report.capacity_bytes or psutil.virtual_memory().total):
            runs[name] = partial(timed, jax.jit(step), *arrays)
    return runs, peaks


def torch_runs(arrays: tuple[Any, Any, Any]) -> dict[str, Callable[[], Any]]:
    """PyTorch's losses on the same device: plain and compiled logits, and Liger and cut-cross-entropy, where installed.

    These two on CUDA only: their kernels are Triton's.
    """
    device = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
    if device is None or not importlib.util.find_spec("torch"):
        return {}
    import torch  # pyrefly: ignore[missing-import]

    if device == "cuda" and not torch.cuda.is_available():
        return {}
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[str(arrays[0].dtype)]
    x, w = (torch.tensor(np.asarray(a, np.float32), device=device, dtype=dtype, requires_grad=True) for a in arrays[:2])
    y = torch.tensor(np.asarray(arrays[2]), device=device).long()

    def plain_torch(x: Any, w: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy((x @ w.T).float(), y)

    losses: dict[str, Loss] = {"PyTorch": plain_torch, "torch.compile": torch.compile(plain_torch)}
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyrefly: ignore[missing-import]

        losses["Liger"] = lambda x, w, y: LigerFusedLinearCrossEntropyLoss()(w, x, y)
    if device == "cuda" and importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy  # pyrefly: ignore[missing-import]

        losses["cut-cross-entropy"] = linear_cross_entropy

    def run(loss: Loss) -> Callable[[], Any]:
        def step() -> Any:
            value = loss(x, w, y)
            gradients = torch.autograd.grad(value, (x, w))
            if device == "cuda":
                torch.cuda.synchronize()
            return value, gradients

        return step

    return {name: run(loss) for name, loss in losses.items()}


def torch_peak(run: Callable[[], Any]) -> float | None:
    """The GiB in use at the fullest moment of a call, arguments too, as PyTorch's allocator counts; None on a CPU."""
    import torch  # pyrefly: ignore[missing-import]

    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / GiB


def measure_times(token_counts: list[int], width: int, dtypes: list[str], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for dtype in dtypes:
        for tokens in token_counts:
            arrays = problem(tokens, width, dtype)
            runs, peaks = jax_runs(arrays)
            by_torch = torch_runs(arrays)
            names = [*peaks, *by_torch]
            runs |= by_torch
            seconds: dict[str, list[float]] = {name: [] for name in names}
            failed: dict[str, str] = {}
            for name in list(runs):
                try:
                    runs[name]()  # compiles
                except Exception as error:  # somebody else's kernel, on a machine for which it was not made
                    failed[name] = (str(error).strip().splitlines() or [repr(error)])[-1][:80]
                    del runs[name]
            counted = {name: torch_peak(run) for name, run in runs.items() if name in by_torch}
            for _ in range(rounds):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run()
                    seconds[name].append(time.perf_counter() - start)
            for name in names:
                row: dict[str, Any] = {"dtype": dtype, "tokens": tokens, "loss": name, "error": failed.get(name)}
                row |= {"seconds": min(seconds[name], default=float("inf")), "GiB": (peaks | counted).get(name)}
                rows.append(row)
                print(row, flush=True)
    return rows


def measure_peaks(token_counts: list[int], width: int, targets: list[str]) -> list[dict[str, Any]]:
    rows = []
    for target in filter(jaxmem.available, targets):
        for tokens in token_counts:
            shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, width), (VOCAB, width))]
            labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
            for name, loss in jax_losses().items():
                fn = jax.value_and_grad(loss, argnums=(0, 1))
                row: dict[str, Any] = {"target": target, "tokens": tokens, "loss": name}
                try:
                    report = jaxmem.compile_report(fn, *shapes, labels, chip=target)
                    row |= {"GiB": report.peak_bytes / GiB, "fits": report.fits}
                except RuntimeError as error:
                    row |= {"error": str(error).strip().splitlines()[-1][-60:]}
                rows.append(row)
                print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]], group: str, cell: Callable[[dict[str, Any], list[dict[str, Any]]], str]) -> str:
    """Markdown: one line per loss, one column per group and number of tokens."""
    columns = list(dict.fromkeys((row[group], row["tokens"]) for row in rows))
    lines = ["| loss | " + " | ".join(f"{g}, {n:,}" for g, n in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row["loss"] for row in rows):
        cells = []
        for column in columns:
            peers = [row for row in rows if (row[group], row["tokens"]) == column]
            cells.append(next((cell(row, peers) for row in peers if row["loss"] == name), ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def time_cell(row: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    plain_seconds = next(p["seconds"] for p in peers if p["loss"].startswith("plain"))
    peak = f", {row['GiB']:.1f} GiB" if row["GiB"] else ""
    if row["error"]:
        return f"failed: {row['error']}"
    if np.isinf(row["seconds"]):
        return f"not run{peak}"
    ratio = "" if np.isinf(plain_seconds) else f" ({row['seconds'] / plain_seconds:.2f})"
    seconds = f"{row['seconds']:.2f} s" if row["seconds"] >= 0.1 else f"{1e3 * row['seconds']:.2f} ms"
    return f"{seconds}{ratio}{peak}"


def peak_cell(row: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    if "error" in row:
        return "no report"
    return f"{row['GiB']:.2f}" if row["fits"] else f"{row['GiB']:.2f}, does not fit"


def figure(rows: list[dict[str, Any]], group: str, key: str, label: str, file: Path) -> None:
    """One panel per group: the value against the number of tokens, a line for each loss."""
    import matplotlib.pyplot as plt

    from llamem_course import plots

    groups = list(dict.fromkeys(row[group] for row in rows))
    fig, axes = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4), sharey=True, squeeze=False)
    for ax, name_of_group in zip(axes[0], groups, strict=True):
        for marker, name in zip(plots.MARKERS * 2, dict.fromkeys(row["loss"] for row in rows), strict=False):
            line = [(r["tokens"], r[key]) for r in rows if r["loss"] == name and r[group] == name_of_group and key in r]
            line = [point for point in line if np.isfinite(point[1])]
            if line:
                ax.loglog(*zip(*line, strict=True), marker=marker, label=name)
        ax.set(xlabel="tokens", title=name_of_group)
    axes[0][0].set_ylabel(label)
    axes[0][0].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(file, dpi=90)


def peers() -> str:
    """The versions of other projects' losses that are installed, each after a comma."""
    packages = {"tokamax": "tokamax", "torch": "torch", "liger_kernel": "liger-kernel"}
    packages["cut_cross_entropy"] = "cut-cross-entropy"
    found = [name for module, name in packages.items() if importlib.util.find_spec(module)]
    return "".join(f", {name} {importlib.metadata.version(name)}" for name in found)


def versions() -> str:
    packages = ("jax", "jaxlib", "optax")
    return ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages) + f", {compilers_used()}" + peers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["times", "peaks", "both"], default="both")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-tokens", type=int, nargs="+", default=[8192, 65_536])
    parser.add_argument("--targets", nargs="+", default=["v6e-1", "v5e-1", "v5p-1", "h100"])
    args = parser.parse_args()
    del sys.argv[1:]  # tokamax reads them too, and refuses what it does not know
    head = f"{datetime.date.today()}, {versions()}, Python {platform.python_version()}. By `benchmarks/loss.py`."
    if args.part in ("times", "both"):
        times = measure_times(args.tokens, args.width, args.dtypes, args.rounds)
        device = jax.devices()[0].device_kind
        where = f"{device}, {os.cpu_count()} cores" if device == "cpu" else device
        title = f"# Seconds for the loss and both gradients, V = 128,256, D = {args.width}, on {where}"
        note = (
            "In parentheses: as a fraction of plain logits in the same rounds. Then the compiled peak on this machine."
        )
        write("loss_times", [title, head, note, table(times, "dtype", time_cell)])
        figure(times, "dtype", "seconds", "seconds", HERE / "loss_times.png")
    if args.part in ("peaks", "both"):
        peaks = measure_peaks(args.peak_tokens, 4096, args.targets)
        title = "# Peak GiB of the loss and both gradients, V = 128,256, D = 4,096, bfloat16, by chips' compilers"
        write("loss_peaks", [title, head, table(peaks, "target", peak_cell)])
        figure(peaks, "target", "GiB", "compiled peak (GiB)", HERE / "loss_peaks.png")


def write(name: str, paragraphs: list[str]) -> None:
    text = "\n\n".join(paragraphs) + "\n"
    (HERE / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
