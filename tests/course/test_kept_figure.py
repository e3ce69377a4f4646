"""The figure of what a layer keeps says kept where `jaxmem.saved_residuals` lists the array."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from jaxmem import saved_residuals
from llamem_course.kept_figure import kept


def layer(w_up, w_down, x):
    h = jnp.tanh(x @ w_up)
    return x + (jnp.sin(h) * h) @ w_down


def kept_by(one):
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 32), (32, 8), (64, 8))]
    return saved_residuals(lambda *arrays: jnp.sum(one(*arrays) ** 2), *shapes)


def test_a_checkpoint_keeps_the_input_alone_and_makes_the_rest_again():
    figure, words = kept({"plain": kept_by(layer), "wrapped": kept_by(jax.checkpoint(layer))}, 4 * 64 * 8)
    plain, wrapped = ([text.get_text() for text in ax.texts] for ax in figure.axes)
    plt.close(figure)
    assert wrapped == ["kept", *6 * ["made again"], "kept"]
    assert plain[:3] == ["kept", "dropped", "kept"] and "made again" not in plain
    assert "wrapped keeps x, for the loss" in words
