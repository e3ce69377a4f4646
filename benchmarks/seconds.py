"""Seconds three ways: a TPU's compiler's own estimate, the planner's roofline, and what others measured on the chip.

`python benchmarks/seconds.py` writes seconds.md beside itself; parts of programs' names take a part, and other lines
stay. The compiler is asked to the end, which takes it up to a minute for a step. Nothing runs.
"""

import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem
from llamem.planner.roofline import PRODUCTS, TRAFFIC, pace

TABLE = Path(__file__).with_suffix(".md")
D, V = 4096, 128_256  # of Llama 3's 8B
MARIN = "marin, `.agents/projects/linear_ce_loss.md`, in plain XLA, blocks over the vocabulary, four products as here"
TOKAMAX = 'tokamax\'s autotuning cache, `linear_softmax_cross_entropy_loss`, "xla", forward'
MAXTEXT = "MaxText, pull request 4720, v5p-128, context 16: 60.1 % of the chips' peak, put into seconds by our count"
HEAD = ("program", "chip", "compiler", "roofline", "measured", "compiler / measured", "roofline / measured",
        "compiler / roofline", "what was asked", "measured by")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """Seconds of one program on one chip, None where there are none."""

    program: str
    chip: str
    compiler: float | None
    roofline: float
    measured: float | None
    asked: str
    source: str

    @property
    def cells(self) -> list[str]:
        """The line of the table."""
        seconds = [self.compiler, self.roofline, self.measured]
        compiler, roofline, measured = seconds
        pairs = ((compiler, measured), (roofline, measured), (compiler, roofline))
        ratios = [f"{a / b:.2f}" if a and b else "" for a, b in pairs]
        shown = [f"{one:.4f}" if one else "" for one in seconds]
        return [self.program, self.chip, *shown, *ratios, self.asked, self.source]


def ask(fn: Callable[..., Any], *shapes: Any, chip: str, **options: Any) -> jaxmem.Report:
    return jaxmem.compile_report(fn, *shapes, chip=chip, depth="code", **options)


def words(report: jaxmem.Report) -> str:
    """Return what was compiled, and what of it has no estimate."""
    without = f", but for {len(report.untimed)} kinds of operations" if report.untimed else ""
    return f"compiled whole{without}"


def loss(chip: str, tokens: int, dtype: str, measured: float, source: str, *, forward: bool) -> Row:
    """The loss of Llama 3's head, without the layers: one forward pass, or loss and gradients."""

    def in_one(x: Any, head: Any, targets: Any) -> Any:
        logits = jnp.dot(x, head.T, preferred_element_type=jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0])

    tiles = functools.partial(llamem.tiled_cross_entropy, axis="vocab")
    fn = in_one if forward else jax.value_and_grad(tiles, argnums=(0, 1))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((tokens, D), (V, D))]
    report = ask(fn, *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32), chip=chip)
    # The roofline's terms of a head: products, logits that pass through memory, operands.
    products, passes = (1, 8) if forward else (4, 20)
    bytes_moved = passes * tokens * V + products * V * D * jnp.dtype(dtype).itemsize
    of = report.chip
    assert of.bf16_flops and of.bandwidth
    roofline = 2 * products * tokens * D * V / (of.bf16_flops * PRODUCTS) + bytes_moved / (of.bandwidth * TRAFFIC)
    name = f"loss of 8B's head, {'forward' if forward else 'with gradients'}, {tokens:,} tokens, {dtype}"
    return Row(name, chip, report.seconds, roofline, measured, words(report), source)


def step(chip: str, attention: Literal["xla", "splash"]) -> Row:
    """A whole AdamW step of the 1B model."""
    config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    plan = llamem.Plan(attention=attention)
    fn, state, batch = llamem.abstract_step(config, llamem.TrainSettings(batch_size=1, seq_len=2048), plan)
    report = ask(fn, state, batch, chip=chip, donate_argnums=(0,))
    estimate = llamem.estimate(config, plan, chip, seq_len=2048)
    name = f"1B, AdamW, 1 x 2,048 tokens, attention in {'plain JAX' if attention == 'xla' else 'Splash'}"
    return Row(name, chip, report.seconds, estimate.seconds.total, None, words(report), "")


def pod(seq_len: int, share: float, source: str) -> Row:
    """A step of 8B on 64 chips, of which `share` of their peak was measured."""
    config = llamem.LlamaConfig.from_name("llama3.1-8b", param_dtype=jnp.float32, compute_dtype=jnp.bfloat16)
    found = pace(config, "v5p", {"fsdp": 4, "context": 16}, batch_size=4, seq_len=seq_len)
    seconds = found.products + sum(found.links.values())
    name = f"8B, AdamW, 4 x {seq_len:,} tokens, fsdp 4 x context 16"
    return Row(name, "64 v5p", None, seconds, seconds * found.mfu / share, "estimated, not compiled", source)


ROWS: dict[str, Callable[[], Row]] = {
    "loss v5e": lambda: loss("v5e-1", 8192, "float32", 0.288, MARIN, forward=False),
    "loss v6e": lambda: loss("v6e-1", 8192, "float32", 0.126, MARIN, forward=False),
    "loss v5p": lambda: loss("v5p-1", 32_768, "float32", 0.365, MARIN, forward=False),
    "forward v6e 4096": lambda: loss("v6e-1", 4096, "bfloat16", 0.0078, TOKAMAX, forward=True),
    "forward v6e 16384": lambda: loss("v6e-1", 16_384, "bfloat16", 0.0334, TOKAMAX, forward=True),
    "pod 64k": lambda: pod(65_536, 0.601, MAXTEXT),
    "step v5e": lambda: step("v5e-1", "xla"),
    "step v5p": lambda: step("v5p-1", "xla"),
    "step v6e": lambda: step("v6e-1", "xla"),
    "step Splash v5e": lambda: step("v5e-1", "splash"),
}


def main() -> None:
    """Write the table."""
    for name, make in ROWS.items():
        if len(sys.argv) < 2 or any(part in name for part in sys.argv[1:]):
            line = f"| {' | '.join(make().cells)} |"
            print(line, flush=True)
            write(line)


def write(line: str) -> None:
    kept = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {tuple(one.split(" | ")[:2]): one for one in (*kept, line) if one.startswith("| ")}
    rows.pop(("| program", "chip"), None)
    TABLE.write_text(
        f"# Seconds, three ways\n\n{datetime.date.today()}, {compilers_used()}, by `benchmarks/seconds.py`. Nothing "
        'ran here. "compiler" is the\nestimate that a TPU\'s compiler makes of each operation, added up '
        '(`compile_report(..., depth="code").seconds`), "roofline"\nthe planner\'s, with its assumed shares of a '
        'chip\'s peak (`llamem.estimate`, `llamem.planner.roofline`), "measured" what others report\nof their own '
        "programs for the same arithmetic. Compilers for GPUs estimate nothing.\n\n"
        + "\n".join([f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *rows.values()])
        + "\n"
    )


if __name__ == "__main__":
    main()
