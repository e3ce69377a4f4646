"""The figures of notebook 03: copied slices, step by step, and what nested scans hold, at any depth."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from jaxmem.reading.timeline import Span, Timeline
from llamem_course.layer_figure import alive, held_slices, waiting_slices

GiB = 2**30


def program(*lives: tuple[int, int, str]) -> Timeline:
    spans = [
        Span("s", GiB, first, last, "device", 0, i * GiB, "bf16[1]", "workspace", "forward", operation, "")
        for i, (first, last, operation) in enumerate(lives)
    ]
    passes = (("forward", 0, 3), ("backward", 3, 6))
    return Timeline("h100", None, 9 * GiB, 6, tuple(spans), (), passes, ("",) * 6)


def test_slices_are_added_up_at_each_step():
    one = program((0, 1, "a/slice"), (1, 4, "b/squeeze"), (1, 2, "c/dot_general"))
    np.testing.assert_array_equal(held_slices(one, GiB) / GiB, [1, 2, 1, 1, 1, 0])
    assert not held_slices(one, GiB // 2).any()
    fig, alt = waiting_slices({"some": one, "none": program()}, GiB, 4 * GiB)
    assert [ax.get_title() for ax in fig.axes] == ["some: at most 2.00 GiB", "none: at most 0.00 GiB"]
    assert [label.get_text() for label in fig.axes[0].get_xticklabels()] == ["forward", "backward"]
    assert "some: at most 2.00" in alt and "the weights: 4.00" in alt
    plt.close(fig)


@pytest.mark.parametrize(("n_layers", "groups"), [(16, 4), (32, 4), (6, 3)])
def test_what_nested_scans_hold_is_drawn_at_any_depth(n_layers, groups):
    fig, alt = alive(n_layers, groups)
    (ax,) = fig.axes
    filled = sum(bool(patch.get_fill()) for patch in ax.patches)
    size = n_layers // groups
    assert len(ax.patches) == 5 * n_layers and filled == n_layers + groups + 3 * size
    assert f"{groups} inputs of groups" in alt and f"{size} inputs of layers" in alt
    plt.close(fig)
