"""FLOPs of the matrix products and convolutions of a traced program."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core as jex_core

from jaxmem.tracing.jaxprs import KERNELS, OnDevices, computed_again, control_flow, inner_jaxprs


class Products(NamedTuple):
    """What was counted: `flops`; and what was not: calls of `kernels` that JAX does not see into, such as those of
    Pallas, and `loops` that do not say how often they run and hold products, counted once.
    """

    flops: int
    kernels: int
    loops: int


class Window(NamedTuple):
    """One spatial axis of a convolution; `dilation` of the kernel, `holes` of the input (1 means none)."""

    input: int
    kernel: int
    output: int
    stride: int
    dilation: int
    holes: int
    low_padding: int


def matmul_flops(jaxpr: jex_core.Jaxpr) -> int:
    """Count the FLOPs of the matrix products and convolutions of a jaxpr, those in scans times their length.

    Of a cond those of its largest branch, of a `shard_map` those of all its devices. `while` loops of unknown length
    are counted once, as the compilers do; Pallas and cuDNN kernels are not.
    """
    return count_products(jaxpr).flops


def matmul_flops_again(jaxpr: jex_core.Jaxpr) -> int:
    """Count, of `matmul_flops`, those that JAX marked as what checkpoints compute again in the backward pass."""
    return count_products(jaxpr, only_again=True).flops


def count_products(jaxpr: jex_core.Jaxpr, only_again: bool = False) -> Products:
    """Count the products of a jaxpr as `matmul_flops` does, and what that leaves out.

    `only_again`: those alone that checkpoints compute again.
    """
    flops = kernels = loops = 0
    for eqn in jaxpr.eqns:
        name, counts = eqn.primitive.name, not only_again or computed_again(eqn)
        if name.startswith(KERNELS):
            kernels += counts
            continue
        inside = [count_products(inner, not counts) for inner in inner_jaxprs(eqn)]
        if name == "cond":
            inside = [max(inside, key=lambda products: products.flops)]
        runs = eqn.params["length"] if name == "scan" else 1
        if isinstance(flow := control_flow(eqn), OnDevices):
            runs = flow.devices
        flops += counts * _own_flops(eqn) + runs * sum(products.flops for products in inside)
        kernels += runs * sum(products.kernels for products in inside)
        loops += sum(products.loops for products in inside)
        loops += name == "while" and any(products.flops or products.kernels for products in inside)
    return Products(flops, kernels, loops)


def convolution_flops(output: int, features: int, windows: Iterable[Window]) -> int:
    """Count the FLOPs of a convolution, each product with padding or a hole left out.

    `output`: its batch times its features, `features`: those of the input that one output feature sums over.
    """
    products = output * features
    for axis in windows:
        # Batches of matrix products become convolutions over a spatial axis full of holes: only what meets data counts.
        starts = np.arange(axis.output)[:, None] * axis.stride - axis.low_padding
        positions = starts + np.arange(axis.kernel) * axis.dilation
        inside = (positions >= 0) & (positions <= (axis.input - 1) * axis.holes)
        products *= int(np.sum(inside & (positions % axis.holes == 0)))
    return 2 * products


def summed_over(eqn: jex_core.JaxprEqn) -> int | None:
    """Return over how many numbers a matrix product sums for each of its results; None for what is none."""
    if eqn.primitive.name != "dot_general":
        return None
    out: Any = eqn.outvars[0].aval
    return _own_flops(eqn) // (2 * out.size) if out.size else None


def _own_flops(eqn: jex_core.JaxprEqn) -> int:
    arrays: list[Any] = [var.aval for var in (*eqn.invars[:2], *eqn.outvars)]
    if eqn.primitive.name == "conv_general_dilated":
        lhs, kernel, out = (array.shape for array in arrays)
        return _convolution(lhs, kernel, out, eqn.params)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        groups = 1
    elif eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        # Where the rows are summed over, each counts in one of the groups of the output's first axis.
        groups = arrays[-1].shape[0] if numbers.lhs_ragged_dimensions[0] in contracted else 1
    else:
        return 0
    lhs, out = arrays[0].shape, arrays[-1].shape
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted) // groups


def _convolution(lhs: tuple[int, ...], kernel: tuple[int, ...], out: tuple[int, ...], params: dict[str, Any]) -> int:
    of_lhs, of_kernel, of_out = params["dimension_numbers"]
    spatial = (
        [sizes[axis] for axis in axes[2:]] for sizes, axes in ((lhs, of_lhs), (kernel, of_kernel), (out, of_out))
    )
    names = ("window_strides", "rhs_dilation", "lhs_dilation")
    low = [low for low, _ in params["padding"]]
    windows = [Window(*row) for row in zip(*spatial, *(params[name] for name in names), low, strict=True)]
    return convolution_flops(out[of_out[0]] * out[of_out[1]], kernel[of_kernel[1]], windows)
