"""Predicted against measured: what the compiler says a program needs, and what the device's allocator then counts.

    python benchmarks/accelerator.py                         # on the GPU, TPU or CPU at hand; writes accelerator_*.md
    python benchmarks/accelerator.py --predict h100          # the same peaks for a chip that is not there, as JSON
    python benchmarks/accelerator.py --predicted peaks.json  # on that chip: what another machine predicted, beside it

Every program runs in a process of its own: an allocator's peak is that of its whole life. On a CPU the sizes are small,
so that this can always be tried; there the operating system counts, and rounds up.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from loss import plain, products

import llamem
from llamem.layers import causal_attention
from llamem.memory import GiB, measure
from llamem.train import loss_fn, make_model

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, the shapes of its arguments, which of them it may overwrite, and what one call computes.

    `flops` are those of the model's own products, without what is computed twice: for MFU; 0 where no time is taken.
    `tokens` per call.
    """

    name: str
    fn: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    flops: float = 0.0
    tokens: int = 0


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def losses(N: int, D: int, V: int) -> Iterator[Program]:
    x, head, ids = shape(N, D), shape(V, D), shape(N, dtype=jnp.int32)
    tiled = llamem.tiled_cross_entropy
    flops = 6.0 * N * V * D
    for name, loss in {
        "plain (optax)": plain,
        "auto": tiled,
        "tokens, 8 tiles": partial(tiled, axis="tokens", num_tiles=8),
        "vocab, 64 tiles": partial(tiled, axis="vocab", num_tiles=64),
    }.items():
        gradients = jax.value_and_grad(loss, argnums=(0, 1))
        yield Program(f"loss and gradients, {name}", gradients, (x, head, ids), flops=flops, tokens=N)
    yield Program("the loss's three products alone", products, (x, head, ids), flops=flops, tokens=N)
    yield Program("loss alone, auto", tiled, (x, head, ids))


def stacks(N: int, D: int, L: int) -> Iterator[Program]:
    def layer(w: Any, x_ND: Any) -> Any:
        return x_ND + jnp.tanh(x_ND @ w["up"]) @ w["down"]

    weights = {"up": shape(L, D, 4 * D), "down": shape(L, 4 * D, D)}
    for mode, remat in itertools.product(("scan", "unroll", "nested"), (None, "nothing")):

        def loss(w: Any, x_ND: Any, mode: Any = mode, remat: Any = remat) -> Any:
            out_ND = llamem.apply_stack(layer, w, x_ND, mode=mode, remat=remat)
            return jnp.mean(out_ND.astype(jnp.float32) ** 2)

        yield Program(f"stack, {mode}, remat={remat}", jax.value_and_grad(loss), (weights, shape(N, D)))


def attentions(T: int, H: int, h: int) -> Iterator[Program]:
    for how in ("xla", "tiled"):

        def loss(q: Any, k: Any, v: Any, how: Any = how) -> Any:
            return jnp.sum(causal_attention(q, k, v, implementation=how).astype(jnp.float32) ** 2)

        qkv = (shape(1, T, H, h), shape(1, T, H // 4, h), shape(1, T, H // 4, h))
        yield Program(f"attention and gradients, {how}", jax.grad(loss, argnums=(0, 1, 2)), qkv)


def steps(config: llamem.LlamaConfig, seq_len: int) -> Iterator[Program]:
    plans = {
        "neither": llamem.Plan(remat=None, loss_tiles=None),
        "tiling": llamem.Plan(remat=None),
        "remat": llamem.Plan(loss_tiles=None),
        "both": llamem.Plan(),
    }
    settings = llamem.TrainSettings(batch_size=1, seq_len=seq_len)
    flops = 3.0 * seq_len * config.flops_per_token(seq_len)
    for name, plan in plans.items():
        step, state, batch = llamem.abstract_step(config, settings, plan)
        yield Program(f"training step, {name}", step, (state, batch), (0,), flops, seq_len)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, settings, plans["both"])))
    _, state, batch = llamem.abstract_step(config, settings)
    yield Program("gradients, both", jax.value_and_grad(partial(loss_fn, graphdef)), (state.params, *batch))


def programs(small: bool) -> dict[str, Program]:
    if small:
        config = llamem.LlamaConfig.from_name("tiny", vocab_size=32_000)
        loss_NDV, stack_NDL, attention_THh, T = (512, 64, 32_000), (512, 128, 6), (1024, 8, 16), 256
    else:
        config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        loss_NDV, stack_NDL, attention_THh, T = (4096, 4096, 128_256), (8192, 2048, 16), (8192, 32, 64), 8192
    found = [*losses(*loss_NDV), *stacks(*stack_NDL), *attentions(*attention_THh), *steps(config, T)]
    return {program.name: program for program in found}


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
    compiled = jax.jit(program.fn, donate_argnums=program.donate).lower(*program.shapes).compile()
    args, taken = list(arrays(program.shapes)), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(*args))
        taken.append(time.perf_counter() - start)
        if program.donate:
            args[0] = out[0]
    return statistics.median(taken[1:])


def one(program: Program, predicted: int | None) -> dict[str, Any]:
    """What was predicted and what was counted, in bytes and seconds, of one program in this process."""
    report = llamem.compile_report(program.fn, *program.shapes, donate=program.donate)
    row: dict[str, Any] = {"program": program.name, "predicted": report.peak_bytes, "elsewhere": predicted}
    if not report.fits:
        return row | {"error": "does not fit"}
    count = measure(program.fn, *arrays(program.shapes), donate=program.donate)
    # What was in use before is the arguments, and on a CPU the whole process: so only the rise counts.
    row |= {"measured": report.argument_bytes + count.rise_bytes, "exact": count.exact, "counted_by": count.counted_by}
    if program.flops:
        row |= {"seconds": seconds_of(program), "flops": program.flops, "tokens": program.tokens}
    return row


def table(rows: list[dict[str, Any]], peak_flops: float | None) -> str:
    lines = [
        "| program | predicted here, GiB | predicted without the chip | counted by the allocator | prediction / count "
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


def child(name: str, predicted: Path | None) -> Any:
    """The device's kind and a program's row, from a process of its own; for no program's name the list of them all."""
    command = [sys.executable, __file__, "--one", name, *(["--predicted", str(predicted)] if predicted else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError((run.stderr.strip().splitlines() or ["no message"])[-1][:200])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", metavar="CHIP", help="print peaks for this absent chip as JSON, and run nothing")
    parser.add_argument("--predicted", type=Path, help="such a file, to be put beside what is measured")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a child's program
    parser.add_argument("--out", type=Path, default=HERE, help="the folder to write to")
    args = parser.parse_args()
    if args.predict:
        peaks = {}
        for name, program in programs(small=False).items():
            if args.only in name:
                report = llamem.compile_report(program.fn, *program.shapes, donate=program.donate, target=args.predict)
                peaks[name] = report.peak_bytes
        print(json.dumps(peaks, indent=1))
        return
    if args.one:
        here = jax.local_devices()[0]
        chosen = programs(small=here.platform == "cpu")
        predicted = json.loads(args.predicted.read_text()) if args.predicted else {}
        found = one(chosen[args.one], predicted.get(args.one)) if args.one in chosen else list(chosen)
        print(json.dumps([here.device_kind, found]))
        return
    # This process touches no device: a TPU belongs to one process at a time, and a GPU's memory is taken beforehand.
    device, names = child("which", args.predicted)
    rows: list[dict[str, Any]] = []
    for name in filter(lambda name: args.only in name, names):
        try:
            rows.append(child(name, args.predicted)[1])
        except RuntimeError as error:
            rows.append({"program": name, "error": str(error)})
        print(rows[-1], flush=True)
    peak_flops = next((chip.peak_flops for chip in llamem.TARGETS.values() if chip.device_kind == device), None)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "optax"))
    ratios = [row["predicted"] / row["measured"] for row in rows if "measured" in row]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}, median {np.median(ratios):.3f}" if ratios else "none"
    text = "\n\n".join(
        [
            f"# Predicted and counted peaks on {device}",
            f"{datetime.date.today()}, {versions}. By `benchmarks/accelerator.py`. Prediction over count: {spread}.",
            table(rows, peak_flops),
        ]
    )
    kind = device.lower().replace(" ", "-")
    (args.out / f"accelerator_{kind}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
