"""What notebook 05 measures: how exact a loss is on a mesh, and what each device works and receives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import Report, chip_called, compile_report
from llamem.layers.tile_loops import vary
from llamem_course.baseline import exact_loss, relative_error


class Counted(NamedTuple):
    """Of one of eight devices: its work in shares, eighths of the whole, its messages, and the bytes that arrive."""

    work: float
    messages: int
    arriving: int


def counted(report: Report) -> Counted:
    """Return what one of eight devices does in a compiled program; where the work is divided, it does one share."""
    share = report.matmul_flops / 8
    messages = sum(row.times for row in report.collectives)
    arriving = sum(row.arriving or 0 for row in report.collectives)
    return Counted((report.compiled_matmul_flops or 0) / share, messages, arriving)


def milliseconds(report: Report, chip: str) -> tuple[float, float]:
    """Return the least milliseconds of one chip's matmuls, and of what arrives there over its links to other chips."""
    one = chip_called(chip)
    link = one.chip_link or one.host_link  # cards without links of their own send through the host
    assert one.peak_flops and link, chip
    return 1000 * (report.compiled_matmul_flops or 0) / one.peak_flops, 1000 * counted(report).arriving / link


def differing(array: Any, axis: str) -> Any:
    """Return what is the same on all devices of an axis, said to differ: its gradient is summed over them here."""
    return vary(array, frozenset({axis}))


def llama_8b_arrays(mesh: Mesh, specs: tuple[P, P, P], tokens: int) -> list[jax.ShapeDtypeStruct]:
    """Return hidden states, head and targets of Llama 3 8B, in bfloat16 and int32, as they lie on a mesh."""
    width, vocab = 4096, 128_256
    sizes = ((tokens, width), jnp.bfloat16), ((vocab, width), jnp.bfloat16), ((tokens,), jnp.int32)
    placed = zip(sizes, specs, strict=True)
    return [jax.ShapeDtypeStruct(*size, sharding=NamedSharding(mesh, spec)) for size, spec in placed]


def compare(
    name: str, losses: Mapping[str, Callable[..., Any]], placed: Mapping[str, Sequence[jax.Array]]
) -> dict[str, Counted]:
    """Differentiate a loss on each axis of a mesh, print a table, and return what is counted on each axis.

    `losses[axis]` takes hidden states, head and targets, and returns the loss summed over tokens. `placed[axis]` are
    these arrays on the devices. The error is the largest of the loss's and both gradients', against float64.
    """
    print(f"{name:22}error{'work':>8}{'messages':>11}{'KiB arrive':>13}")
    found = {}
    for axis, loss in losses.items():
        arrays, program = placed[axis], jax.value_and_grad(loss, argnums=(0, 1))
        exact = exact_loss(*arrays)
        sums = jax.tree.leaves(jax.jit(program)(*arrays))
        tokens = len(arrays[2])
        error = max(relative_error(np.asarray(got) / tokens, want) for got, want in zip(sums, exact, strict=True))
        found[axis] = work, messages, arriving = counted(compile_report(program, *arrays))
        print(f"    {axis:18}{error:5.0e}{work:8.2f}{messages:11}{arriving / 1024:13,.0f}")
    return found
