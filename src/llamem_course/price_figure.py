"""The figure of notebook 08: what each tool takes off the peak, and what it costs in time, at two lengths."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from llamem_course.plots import HATCHES


def tool_prices(prices: Mapping[tuple[int, str], tuple[float, float]]) -> Figure:
    """Draw GiB saved and more time, as a share, by tokens and name of the tool: two panels, a bar for each length."""
    lengths, names = list(dict.fromkeys(n for n, _ in prices)), list(dict.fromkeys(name for _, name in prices))
    fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True, layout="constrained")
    height = 0.8 / len(lengths)
    for ax, i, scale, form in zip(axes, (0, 1), (1, 100), ("%.2f", "%.0f %%"), strict=True):
        for n, (length, hatch) in enumerate(zip(lengths, HATCHES, strict=False)):
            places = [place + height * (n - (len(lengths) - 1) / 2) for place in range(len(names))]
            sizes = [scale * prices[length, name][i] for name in names]
            bars = ax.barh(places, sizes, height, hatch=hatch, edgecolor="white", label=f"{length:,} tokens")
            ax.bar_label(bars, fmt=form, padding=3, fontsize=9)
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].set_title("what it buys: GiB less at the peak", loc="left", fontsize=10.5)
    axes[1].set_title("what it costs: more time for the step", loc="left", fontsize=10.5)
    axes[0].set_xlabel("GiB (estimated)")
    axes[1].set_xlabel("% (estimated)")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lengths), frameon=False)
    return fig


def tool_prices_alt(prices: Mapping[tuple[int, str], tuple[float, float]]) -> str:
    """Return what `tool_prices` shows, in words."""
    told = [
        f"At {tokens:,} tokens {name}: {abs(saved):.2f} GiB {'less' if saved >= 0 else 'more'}, {more:.0%} more time."
        for (tokens, name), (saved, more) in prices.items()
    ]
    return "What each tool buys in memory and costs in time, as bars for each length. " + " ".join(told)
