"""A stack of layers, played turn by turn: what each has in memory and which one runs, with checkpoints or without."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

Way = Literal["no checkpoint", "each layer", "nested", "whole loss"]
WAYS: tuple[Way, ...] = get_args(Way)

_NOTHING, _KEPT, _EVERYTHING, _INPUT = 0, 1, 2, 3
_BLUES = ("#a8c8e8", "#1f5f9f")
_RUNS = {"forward": "black", "again": "C1", "backward": "C2"}


@dataclasses.dataclass(frozen=True)
class Play:
    """One forward and backward pass, one layer at a time.

    `stored` says what each layer has in memory at each step: 0 nothing, 1 what its checkpoint keeps, 2 everything that
    its backward pass needs, 3 the input alone, for its whole group. `runs` are the layer at work in each step, and how:
    forward, again or backward.
    """

    stored: Int[np.ndarray, "steps layers"]
    runs: tuple[tuple[int, str], ...]

    def live(self, kept: float, everything: float) -> np.ndarray:
        """Memory at each step, in units of a layer's input: `kept` by a checkpoint, `everything` by a layer at work."""
        return np.array([0.0, kept, everything, 1.0])[self.stored].sum(axis=1)


def play(way: str, n_layers: int = 16, group: int = 4) -> Play:
    """Plays a stack of `n_layers` layers with checkpoints in one of four places.

    "nested" has a checkpoint around each `group` layers, and one around each layer inside; a last group may be shorter.
    Raises ValueError for an unknown way, and where there is no layer or no group.
    """
    if way not in WAYS:
        raise ValueError(f"play({way!r}): the ways are {', '.join(map(repr, WAYS))}.")
    if n_layers < 1 or group < 1:
        raise ValueError(f"play(n_layers={n_layers}, group={group}): at least one layer, in groups of at least one.")
    stored, frames, runs = np.zeros(n_layers, int), [], []

    def run(layer: int, how: str, keeps: int) -> None:
        stored[layer] = keeps
        frames.append(stored.copy())
        runs.append((layer, how))
        if how == "backward":
            stored[layer] = _NOTHING

    for i in range(n_layers):
        keeps = {"no checkpoint": _EVERYTHING, "each layer": _KEPT, "nested": _NOTHING if i % group else _INPUT}
        run(i, "forward", keeps.get(way, _NOTHING))
    size = group if way == "nested" else n_layers
    for start in reversed(range(0, n_layers, size)):
        part = range(start, min(start + size, n_layers))
        if way in ("whole loss", "nested"):
            for i in part if way == "whole loss" else part[:-1]:  # nobody asks what a group's last layer returns
                run(i, "again", _KEPT if way == "nested" else _EVERYTHING)
        for i in reversed(part):
            if way in ("each layer", "nested"):
                run(i, "again", _EVERYTHING)
            run(i, "backward", _EVERYTHING)
    return Play(np.array(frames), tuple(runs))


def layer_grid(
    n_layers: int = 16, group: int = 4, kept: float = 1.0, everything: float = 11.0, ways: Sequence[Way] = WAYS
) -> Figure:
    """Each way's grid of layers against turns, and below it what is in memory; `layer_grid_alt` says it in words.

    Memory counts in units of a layer's input. `kept` is what a checkpoint keeps: 1 is the input alone, more with a
    policy. `everything` is what a layer without a checkpoint keeps, and what one at work needs. Ways whose peak is less
    than a third of the highest are drawn on a scale of their own, which the title says.
    """
    _check(kept, everything)
    plays = {way: play(way, n_layers, group) for way in ways}
    size = (3 * len(plays) + 0.4, 5.2)
    fig, axes = plt.subplots(
        2, len(plays), figsize=size, height_ratios=[4, 3], sharex=True, squeeze=False, layout="constrained"
    )
    peaks = [one.live(kept, everything).max() for one in plays.values()]
    low_ones = [peak for peak in peaks if peak < max(peaks) / 3]  # flat on the scale of the highest
    for (way, one), top, bottom in zip(plays.items(), *axes, strict=True):
        if top is not axes[0, 0]:
            top.tick_params(labelleft=False)
        _cells(top, one, f"{way}: {len(one.runs)} turns")
        live = one.live(kept, everything)
        waiting = one.live(kept, 0.0)
        bottom.fill_between(range(len(live)), waiting, step="mid", color=_BLUES[0])
        bottom.fill_between(range(len(live)), waiting, live, step="mid", color=_BLUES[1])
        low = live.max() in low_ones
        scale = 1.15 * max(low_ones if low else peaks)
        title = f"peak {live.max():.4g}{' (other scale)' if low else ''}"
        bottom.set(xlabel="turn: one layer at work", ylim=(0, scale), title=title)
    axes[0, 0].set_ylabel("layer")
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 4, 8, 10]))
    axes[1, 0].set_ylabel("in memory, in inputs")
    patches = [Rectangle((0, 0), 1, 1, color=colour) for colour in (*_BLUES, *_RUNS.values())]
    words = ["kept by a checkpoint", "everything stored", "runs forward", "runs again", "runs backward, then frees"]
    fig.legend(patches, words, loc="outside lower center", ncols=5, frameon=False)
    return fig


def layer_grid_alt(
    n_layers: int = 16, group: int = 4, kept: float = 1.0, everything: float = 11.0, ways: Sequence[Way] = WAYS
) -> str:
    """Return what `layer_grid` shows, in words."""
    words = []
    for way in ways:
        one = play(way, n_layers, group)
        again = sum(how == "again" for _, how in one.runs)
        words.append(f"{way}: peak {one.live(kept, everything).max():.4g}, {again} runs again")
    return f"Grids of {n_layers} layers against turns, and what is in memory, in inputs. {'; '.join(words)}."


def _check(kept: float, everything: float) -> None:
    if not 0 < kept <= everything:
        raise ValueError(
            f"layer_grid(kept={kept}, everything={everything}): a checkpoint keeps at least something, and no more "
            "than everything."
        )


def _cells(ax: Axes, one: Play, title: str) -> None:
    colours = ListedColormap(["0.95", *_BLUES, _BLUES[0]])
    ax.imshow(one.stored.T, aspect="auto", origin="lower", cmap=colours, vmin=_NOTHING, vmax=_INPUT)
    for how, colour in _RUNS.items():
        steps = [(step, layer) for step, (layer, kind) in enumerate(one.runs) if kind == how]
        if steps:
            size = 8 * min(1.0, 16 / one.stored.shape[1])
            ax.scatter(*zip(*steps, strict=True), s=size, marker="s", color=colour)
    ax.set_title(title)
