"""Six models from PyPI that were not written for this package: as their users have them, then stacked and tiled.

`python benchmarks/public_models.py` writes public_models.md beside itself; names of models (`mamba2 gemma3`) take a
part, and the other lines stay. `public_model_cases.py` says what it needs to be installed. Nothing runs but a tiny copy
of each model: peaks are those of the chips' compilers, seconds those of an answer that nobody had asked for before.
"""

import datetime
import inspect
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from compilers_used import compilers_used
from flax import nnx
from public_model_cases import CASES

import jaxmem

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("v5e-1", "t4", "h100")
OPTIMIZER = optax.adamw(1e-3)


def make_step(case: Any, batch: int, remat: str | None = "nothing", stacked: bool = True) -> tuple[Any, ...]:
    """Return the training step at the real size, in nnx one that works in place, and shapes of its arguments."""

    def loss_fn(model: Any, data: Any) -> Any:
        return case.small_loss(model, data, remat) if stacked else case.loss(model, data)

    @nnx.jit
    def in_place(model: Any, optimizer: Any, data: Any) -> Any:
        loss, gradients = nnx.value_and_grad(loss_fn)(model, data)
        optimizer.update(model, gradients)
        return loss

    def train_step(model: Any, moments: Any, data: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, data)
        updates, moments = OPTIMIZER.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), moments, loss

    data = jax.eval_shape(lambda: case.data(batch, tiny=False))
    if case.library == "nnx":
        both = nnx.eval_shape(lambda: (model := case.build(stacked), nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)))
        return in_place, *both, data
    model = eqx.filter_eval_shape(case.build, stacked)
    arrays = eqx.filter(model, lambda leaf: hasattr(leaf, "shape"))
    return train_step, model, jax.eval_shape(OPTIMIZER.init, arrays), data


def peak_and_seconds(case: Any, chip: str, stacked: bool) -> str:
    """Return the peak of a step in GiB, by the chip's compiler, and the seconds to that answer."""
    start, step = time.perf_counter(), make_step(case, case.batch, stacked=stacked)
    report = jaxmem.compile_report(*step, donate_argnums=(0, 1), chip=chip)
    return f"{report.peak_bytes / 2**30:.2f} ({time.perf_counter() - start:.0f} s)"


def parts(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the parameters, and the function that makes a model of them again."""
    if isinstance(model, nnx.Module):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return params, lambda params: nnx.merge(graphdef, params, rest)
    params, static = eqx.partition(model, eqx.is_array)
    return params, lambda params: eqx.combine(params, static)


def both_ways(case: Any) -> tuple[str, str]:
    """Return how far loss and gradients of the tiny model are apart, and what `verify_remat` says of its stack."""
    data = case.data(2, tiny=True)
    params, model_of = parts(case.make(tiny=True))
    loss, gradients = jax.value_and_grad(lambda params: case.loss(model_of(params), data))(params)
    expected = jax.tree.leaves(parts(case.stack(model_of(gradients)))[0])
    stacked, stack_of = parts(case.stack(model_of(params)))

    def small_loss(params: Any, data: Any, remat: str | None = "nothing") -> Any:
        return case.small_loss(stack_of(params), data, remat)

    small, found = jax.value_and_grad(small_loss)(stacked, data)
    apart = [jnp.abs(a - b).max() / jnp.abs(a).max() for a, b in zip(expected, jax.tree.leaves(found), strict=True)]
    verification = jaxmem.verify_remat(small_loss, stacked, data, remat="nothing")
    verdict = "holds" if verification.holds else f"fails: {'; '.join(map(str, verification.failed))}"
    return f"{abs(loss - small) / loss:.0e}, {jnp.nanmax(jnp.array(apart)):.0e}", verdict


def fitting(case: Any) -> str:
    """Return the fastest of ten ways that fits a v5e, its peak, and how many were asked for."""
    batches = [times * case.batch for times in (16, 8, 4, 2, 1)]
    ways = jaxmem.options(partial(make_step, case), batch=batches, remat=[None, "nothing"])
    found = jaxmem.find_fitting(ways, "v5e-1", donate_argnums=(0, 1), progress=None)
    return f"{found.name}: {found.report.peak_bytes / 2**30:.2f}, {len(found.answers)} asked"


def refusal(case: Any) -> str:
    """Return what the natural wrong way gets: the beginning of the message."""
    try:
        case.wrong()
    except (TypeError, ValueError) as error:
        return f"{inspect.getdoc(case.wrong)} `{textwrap.shorten(str(error), 140, placeholder=' ...')}`"
    return "not refused"


def row(name: str) -> str:
    """Return one line of the table."""
    case = CASES[name]
    peaks = [f"{peak_and_seconds(case, chip, False)} → {peak_and_seconds(case, chip, True)}" for chip in CHIPS]
    title = f"{case.title} ({case.library}; {case.package} {metadata.version(case.package)})"
    cells = [title, str(case.lines_written()), *peaks, *both_ways(case), fitting(case), refusal(case)]
    return f"| {' | '.join(cells)} |"


HEADER = """# Public models

{today}, {versions},
by `benchmarks/public_models.py`: six models from PyPI at their real sizes with AdamW, as their own pages write a step →
after the lines that stack and rematerialise the layers and tile the loss over a vocabulary
(`public_model_cases.py`). Peaks in GiB by the chips' compilers, in brackets seconds to the answer on one CPU core,
nothing kept; nothing ran on a chip. "Apart": a tiny copy in f32 both ways, relative: the losses, and the gradients
farthest apart. `find_fitting`: 16, 8, 4, 2 and one times that batch on a v5e, without and with remat.

| model | lines | v5e-1 | t4 | h100 | apart | `verify_remat` | `find_fitting` | a wrong way, and its error |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Fill the table."""
    rows = {line.split(" (")[0]: line for line in TABLE.read_text().splitlines()} if TABLE.exists() else {}
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("flax", "equinox"))
    versions += f", {compilers_used()}, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory() as nothing_kept:
        os.environ["JAXMEM_CACHE"] = nothing_kept
        for name in sys.argv[1:] or CASES:
            rows[f"| {CASES[name].title}"] = row(name)
            found = [rows[key] for case in CASES.values() if (key := f"| {case.title}") in rows]
            TABLE.write_text(HEADER.format(today=datetime.date.today(), versions=versions) + "\n".join(found) + "\n")


if __name__ == "__main__":
    main()
