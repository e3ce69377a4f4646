"""Figures of the course: one style, alternative text for those who listen, and pictures that several notebooks draw."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.figure import Figure

from llamem.memory import GiB, Report

plt.style.use("petroff10")  # colours that remain distinct for colour-blind readers
plt.rcParams.update({"figure.figsize": (8, 4), "figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False})

MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "xx", "--", "oo")


def show(fig: Figure, *, alt: str) -> None:
    """Displays a figure once, with the text that stands for it where it cannot be seen, and closes it."""
    if not alt.strip():
        raise ValueError("show(fig, alt=''): say in a sentence or two what the figure shows.")
    fig.tight_layout()
    display(fig, metadata={"image/png": {"alt": alt}})
    plt.close(fig)


def report_bars(reports: Mapping[str, Report]) -> Figure:
    """Peak memory of several programs as horizontal bars, arguments apart, and each chip's capacity as a line."""
    fig, ax = plt.subplots(figsize=(8, 0.6 * len(reports) + 1.4))
    arguments = [report.argument_bytes / GiB for report in reports.values()]
    rest = [(report.peak_bytes - report.argument_bytes) / GiB for report in reports.values()]
    names = [f"{name}  {report.peak_bytes / GiB:.1f} GiB" for name, report in reports.items()]
    ax.barh(names, arguments, label="weights, optimizer, batch")
    ax.barh(names, rest, left=arguments, hatch="//", edgecolor="white", label="everything the step adds")
    for capacity in sorted({report.capacity_bytes for report in reports.values() if report.capacity_bytes}):
        ax.axvline(capacity / GiB, color="black", linestyle="--", label=f"the chip offers {capacity / GiB:.2f} GiB")
    ax.invert_yaxis()
    ax.set_xlabel("peak memory (GiB)")
    ax.legend(frameon=False, loc="lower right")
    return fig
