"""Lists of layers of several widths, on which the answers to exercise 3 of notebook 03 are tried, and how."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from jaxmem.tracing.residuals import saved_residuals

TOKENS, WIDTH = 5, 3


def softmax_layer(w: Any, x_ND: Any) -> Any:
    """Apply a layer in which zeros that fill up its weights would count."""
    return x_ND + jax.nn.softmax(jnp.sin(x_ND @ w["up"])) @ w["down"]


def list_of_layers(widths: Sequence[int]) -> list[dict[str, Any]]:
    """Return random weights of layers, each as wide inside as `widths` says."""
    keys = jax.random.split(jax.random.key(6), (len(widths), 2))
    return [
        {"up": jax.random.normal(up, (WIDTH, width)), "down": jax.random.normal(down, (width, WIDTH))}
        for (up, down), width in zip(keys, widths, strict=True)
    ]


def run_list(layer: Callable[..., Any], layers: Sequence[Any], x_ND: Any) -> Any:
    """Apply layers one after the other, in a Python loop: the reference."""
    for w in layers:
        x_ND = layer(w, x_ND)
    return x_ND


def check_what_is_kept(fn: Callable[..., Any], layers: list[dict[str, Any]], x_ND: Any) -> None:
    """Raise AssertionError unless the backward pass keeps each layer's input, and of the weights one copy."""
    rows = saved_residuals(lambda w: jnp.sum(fn(softmax_layer, w, x_ND)), layers).rows
    inputs, weights, rest = (
        sum(row.bytes for row in rows if not row.argument and kind(row.shape))
        for kind in (
            lambda shape: shape[-2:] == x_ND.shape,
            lambda shape: shape[-2:] in {leaf.shape for w in layers for leaf in w.values()},
            lambda shape: shape[-2:] in ((TOKENS, 4), (TOKENS, 7)),
        )
    )
    widths = tuple(w["up"].shape[1] for w in layers)
    assert not rest and inputs < (len(layers) + 3) * x_ND.nbytes, (
        f"for layers of the widths {widths} more than the layers' inputs is kept for the backward pass. Is there a "
        "checkpoint around the layer, in a run of one as well?"
    )
    assert inputs > (len(layers) - 2) * x_ND.nbytes, (
        f"for layers of the widths {widths} less than one input for each layer is kept, so several layers are run "
        "again at once, a whole run or a group of one, and what is alive then? Look at 'Inside or outside?'."
    )
    assert weights < 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(layers)), (
        "the weights are kept more than once: does each turn of a loop get its own, and nothing else?"
    )


def check_other_trees(fn: Callable[..., Any]) -> None:
    """Raise AssertionError where an answer knows the names of the weights, or compares the shapes of one leaf alone."""
    x_ND = jnp.ones((TOKENS, WIDTH))
    # Neighbours that are alike in their first array, in the sum of their sizes, in the set of their shapes, in each
    # array's size.
    many, one, row = (WIDTH,), (1,), (1, WIDTH)
    pairs = ((many, one), (one, many), (one, many), (many, many), (row, many), (many, row), (many, one))
    layers = [[jnp.full(gain, i + 1.0), (jnp.full(shift, i + 2.0),)] for i, (gain, shift) in enumerate(pairs)]

    def affine(w: Any, x_ND: Any) -> Any:
        return x_ND * w[0] + w[1][0]

    try:
        out = fn(affine, layers, x_ND)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise AssertionError(
            "another layer has other weights: a list of an array and a tuple of one, each [D], [1] or [1, D]. Yours "
            f"fails: {type(error).__name__}: {str(error).rstrip('.')}. Is a name of weights written into it? Are all "
            "shapes compared?"
        ) from None
    assert np.allclose(out, run_list(affine, layers, x_ND), rtol=1e-4), (
        "wrong for another layer: is one layer written into your answer, or the names or shapes of its weights?"
    )


def count_products(fn: Callable[..., Any], layers: Any, x_ND: Any) -> tuple[int, int]:
    """How many matrix products stand in the traced and in the lowered program of a gradient, each loop's once."""
    gradient = jax.grad(lambda w: jnp.sum(fn(softmax_layer, w, x_ND)))
    traced = sum(eqn.primitive.name == "dot_general" for eqn, _ in equations(jax.make_jaxpr(gradient)(layers).jaxpr))
    lowered = jax.jit(gradient).lower(layers).as_text()
    return traced, lowered.count("dot_general") + lowered.count("call @")
