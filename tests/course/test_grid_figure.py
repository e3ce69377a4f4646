"""The grid of layers: hand-counted peaks and runs, an order that a backward pass could have, sliders that redraw."""

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection

from llamem_course import grid_figure as grids


@pytest.mark.parametrize(
    ("way", "peak", "again"),
    [
        ("no checkpoint", 16 * 11, 0),
        ("each layer", 15 + 11, 16),  # fifteen inputs wait while the last layer has everything
        ("whole loss", 16 * 11, 16),
        ("nested", 3 + 3 + 11, 16 + 12),  # three groups' inputs, three layers' of the last group, one layer at work
    ],
)
def test_peaks_and_runs_are_those_counted_by_hand(way, peak, again):
    one = grids.play(way, 16, 4)
    assert one.live(1, 11).max() == peak
    assert sum(how == "again" for _, how in one.runs) == again
    assert f"{way}: peak {peak}, {again} runs again" in grids.layer_grid_alt(16, 4)


@pytest.mark.parametrize("way", grids.WAYS)
@pytest.mark.parametrize(("n_layers", "group"), [(1, 1), (7, 3), (12, 12), (5, 8)])
def test_every_layer_runs_forward_in_order_and_backward_in_reverse_with_everything_there(way, n_layers, group):
    one = grids.play(way, n_layers, group)
    layers = {how: [i for i, kind in one.runs if kind == how] for how in ("forward", "backward")}
    assert layers["forward"] == list(range(n_layers)) and layers["backward"] == list(range(n_layers))[::-1]
    for stored, (layer, how) in zip(one.stored, one.runs, strict=True):
        assert how != "backward" or stored[layer] == 2
    last = {layer: step for step, (layer, how) in enumerate(one.runs) if how == "backward"}
    assert all(not one.stored[step + 1 :, layer].any() for layer, step in last.items())  # freed for good


def test_the_figure_shows_the_peaks_of_its_arguments():
    fig = grids.layer_grid(8, 2, kept=3, everything=20)
    titles = [ax.get_title() for ax in fig.axes]
    for way in grids.WAYS:
        one = grids.play(way, 8, 2)
        scale = "" if way in ("no checkpoint", "whole loss") else " (other scale)"
        assert f"{way}: {len(one.runs)} turns" in titles and f"peak {one.live(3, 20).max():.0f}{scale}" in titles
    assert fig.axes[4].get_ylim() == fig.axes[7].get_ylim() and fig.axes[5].get_ylim() == fig.axes[6].get_ylim()
    waiting, at_work = fig.axes[4].collections
    assert isinstance(waiting, FillBetweenPolyCollection) and isinstance(at_work, FillBetweenPolyCollection)
    assert np.asarray(at_work.get_paths()[0].vertices)[:, 1].max() == 8 * 20
    inputs = fig.axes[5].collections[0].get_paths()[0].vertices  # eight have run forward, each kept its own
    assert np.asarray(inputs)[:, 1].max() == 8 * 3
