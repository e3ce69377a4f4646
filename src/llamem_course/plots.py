"""Figures of the course: one style, alternative text for those who listen, and pictures that several notebooks draw."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.figure import Figure

from jaxmem.report import GiB, Report
from llamem_course.timeline_figure import timeline, timeline_alt
from llamem_course.timeline_html import timeline_page
from llamem_course.tower_figure import tower, tower_alt

__all__ = [
    "report_bars",
    "show",
    "timeline",
    "timeline_alt",
    "timeline_page",
    "tower",
    "tower_alt",
]

plt.style.use("petroff10")  # colours that remain distinct for colour-blind readers
plt.rcParams.update({"figure.figsize": (8, 4), "figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})

MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "--", "oo")


def show(fig: Figure, *, alt: str) -> None:
    """Display a figure once, with the text that stands for it where it cannot be seen, and closes it."""
    if not alt.strip():
        raise ValueError("show(fig, alt=''): say in a sentence or two what the figure shows.")
    if fig.get_layout_engine() is None:
        fig.tight_layout()
    display(fig, metadata={"image/png": {"alt": alt}})
    plt.close(fig)


def report_bars(reports: Mapping[str, Report]) -> Figure:
    """Peak memory of several programs as horizontal bars of their parts, and each chip's capacity as a line."""
    fig, ax = plt.subplots(figsize=(8, 0.6 * len(reports) + 1.6))
    names = [f"{name}  {report.peak_bytes / GiB:.1f} GiB" for name, report in reports.items()]
    left = [0.0] * len(names)
    labels = {
        "arguments": "arguments: weights, optimizer, batch",
        "outputs": "outputs of their own: gradients, results",
        "temporaries": "temporaries: activations, logits, workspace",
    }
    for part, hatch in zip(labels, HATCHES, strict=False):
        sizes = [report.parts[part] / GiB for report in reports.values()]
        if any(sizes):
            ax.barh(names, sizes, left=left, hatch=hatch, edgecolor="white", label=labels[part])
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for capacity in sorted({report.capacity_bytes for report in reports.values() if report.capacity_bytes}):
        ax.axvline(capacity / GiB, color="black", linestyle="--", label=f"the chip offers {capacity / GiB:.2f} GiB")
    ax.invert_yaxis()
    ax.set_xlabel("peak memory (GiB)")
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.28 if len(reports) > 2 else -0.4), ncols=2)
    return fig
