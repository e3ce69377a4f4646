"""A layer's named values: what each costs, who reads it, which choice keeps it."""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The steps of a Llama layer's backward pass, from the layer's end to its beginning, and the named values that each
# reads. Cheap elementwise results, such as silu(gate) * up and the norms' outputs, are made again of these.
READERS: dict[str, tuple[str, ...]] = {
    "w_down, gate × up": ("gate", "up"),
    "w_gate, w_up, norm": ("block_in", "attn_out"),
    "wo": ("attn",),
    "attention": ("q", "k", "v", "attn"),
    "wq, wk, wv, norm": ("block_in",),
}


def readers(price: Mapping[str, float], keeps: Mapping[str, Sequence[str]]) -> Figure:
    """Return a figure with a row for each named value, in the order in which the layer makes them.

    `price` is MiB of each value, `keeps` the names that each choice keeps besides `block_in`. Left the bytes, in the
    middle who reads the value, right the choices that keep it or make it again; `readers_alt` says it in words.
    """
    fig, (bars, middle, right) = plt.subplots(
        1, 3, figsize=(9.6, 4.5), sharey=True, width_ratios=(2.2, 5, 5), layout="constrained"
    )
    names = list(price)
    drawn = bars.barh(names, list(price.values()), color="0.75", height=0.6)
    bars.bar_label(drawn, fmt="%.0f MiB", padding=3, fontsize=9)
    bars.set(xlim=(0, 1.6 * max(price.values())), xticks=[], ylim=(len(names) - 0.1, -0.6))
    bars.set_title("values, in the\norder made", fontsize=10)
    _grid(bars, [], [])
    bars.tick_params(length=0, labelsize=10)

    _grid(middle, names, list(READERS))
    middle.set_title("the backward pass reads it at →", fontsize=10)
    for x, read in enumerate(READERS.values()):
        middle.plot([x] * len(read), [names.index(name) for name in read], "o", color="0.2", markersize=10)
    for name in names:
        if not _asked_for(name):
            middle.text(
                2, names.index(name), " nobody ", ha="center", va="center", fontsize=10, backgroundcolor="white"
            )

    _grid(right, names, list(keeps))
    right.set_title("each choice   ■ keeps   □ makes again", fontsize=10)
    for x, extra in enumerate(keeps.values()):
        kept = [name for name in names if name in ("block_in", *extra)]
        for of, fill in ((kept, "C0"), ([name for name in names if _asked_for(name) and name not in kept], "white")):
            rows = [names.index(name) for name in of]
            right.plot([x] * len(rows), rows, "s", markersize=10, markeredgecolor="C0", markerfacecolor=fill)
        right.text(x, len(names) - 0.35, f"{sum(price[name] for name in kept):.0f} MiB", ha="center", fontsize=9)
    return fig


def readers_alt(price: Mapping[str, float], keeps: Mapping[str, Sequence[str]]) -> str:
    """Return what `readers` shows, in words."""
    rows = []
    for name, size in price.items():
        read = [step for step, of in READERS.items() if name in of]
        kept = [choice for choice, of in keeps.items() if name in ("block_in", *of)]
        who = f"read by {'; '.join(read)}" if read else "read by nobody"
        rows.append(f"{name} {size:.0f} MiB, {who}, kept by {'; '.join(kept) or 'none'}")
    return f"A layer's named values, a row each. {'. '.join(rows)}."


def _asked_for(name: str) -> bool:
    return any(name in read for read in READERS.values())


def _grid(ax: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw pale lines through rows and columns, the columns' labels above, and no frame."""
    for x in range(len(columns)):
        ax.plot([x, x], [0, len(rows) - 1], color="0.92", zorder=0)
    for y in range(len(rows)):
        ax.plot([0, len(columns) - 1], [y, y], color="0.92", zorder=0)
    if columns:
        ax.set_xticks(range(len(columns)), [textwrap.fill(one, 9) for one in columns], fontsize=9)
        ax.xaxis.tick_top()
        ax.margins(x=0.14)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
