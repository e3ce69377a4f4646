"""The picture of who reads a layer's values: JAX keeps those that are read, and no other one."""

import re

import matplotlib.pyplot as plt
import numpy as np

import llamem
from jaxmem.tracing.residuals import saved_residuals
from llamem.llama import ACTIVATIONS
from llamem_course.measuring import abstract_layers
from llamem_course.policy_figure import READERS, readers, readers_alt


def test_jax_keeps_of_all_names_those_that_have_a_reader():
    plan = llamem.Plan(remat=llamem.Policy(save=ACTIVATIONS), attention="xla")
    config = llamem.LlamaConfig.from_name("llama3.2-1b", n_layers=2)
    layers, *shapes = abstract_layers(config, plan, 96)
    rows = saved_residuals(lambda p, t: layers(p, t).sum(), *shapes).rows
    kept = {found[1] for row in rows if (found := re.search(r"named '(\w+)'", row.operation))}
    assert kept == {name for read in READERS.values() for name in read}


def test_the_picture_has_a_mark_for_each_reader_and_each_choice():
    price = {"block_in": 4.0, "attn": 5.0, "mlp_out": 6.0}
    read = {"block_in": 2, "attn": 2, "mlp_out": 0}
    keeps = {"nothing": (), "attn": ("attn",)}
    fig = readers({name: 1.0 for name in ACTIVATIONS} | price, keeps)
    words = [text.get_text().strip() for ax in fig.axes for text in ax.texts]
    assert {"nobody", "4 MiB", "9 MiB"} <= set(words) and words.count("nobody") == 1
    alt = readers_alt(price, keeps)
    assert (
        "mlp_out 6 MiB, read by nobody, kept by none" in alt
        and "attn 5 MiB, read by wo; attention, kept by attn" in alt
    )
    middle = fig.axes[1]
    for name, times in read.items():
        y = ACTIVATIONS.index(name)
        dots = [np.asarray(line.get_ydata()) for line in middle.lines if line.get_marker() == "o"]
        assert sum(int(np.sum(rows == y)) for rows in dots) == times
    plt.close(fig)
