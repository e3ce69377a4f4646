"""Figures of notebook 07: what fills the chip under each plan, and which tokens of a chat have a loss."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxmem.report import GiB, Report
from llamem_course.plots import report_bars
from llamem_course.timeline_figure import COLOURS

_LIGHT = {"weights", "gradients", "logits", "rematerialised"}  # dark colours, which take light letters
_CHARACTERS = 114  # in a line of the strip of tokens


def peak_bars(reports: Mapping[str, Report]) -> Figure:
    """Draw the fullest moment of each program as a bar of what lies in memory then, and the chip's capacity as a line.

    Where a compiler gives no timeline these are bars of arguments, outputs and temporaries.
    """
    peaks = _peaks(reports)
    if not peaks:
        return report_bars(reports)
    fig, ax = plt.subplots(figsize=(9.4, 0.6 * len(reports) + 1.6))
    first, highest = next(iter(reports.values())), max(report.peak_bytes for report in reports.values()) / GiB
    capacity = (first.capacity_bytes or 0) / GiB
    for row, (name, report) in enumerate(reports.items()):
        left = 0.0
        for category, n_bytes in peaks[name].items():
            width, colour = n_bytes / GiB, "white" if category in _LIGHT else "black"
            ax.barh(row, width, left=left, height=0.7, color=COLOURS[category], edgecolor="white", linewidth=0.8)
            if width > 0.045 * highest:
                words = f"{category}\n{width:.1f}" if width > 0.08 * highest else f"{width:.1f}"
                ax.text(left + width / 2, row, words, ha="center", va="center", fontsize=9, color=colour)
            left += width
        near = left < capacity < left + 0.2 * highest
        words = f"{report.peak_bytes / GiB:.1f} GiB, {'fits' if report.fits else 'does not fit'}"
        words += f"\n{_work(report)}"
        ax.text((capacity if near else left) + 0.012 * highest, row, words, va="center", fontsize=9)
    if capacity:
        ax.axvline(capacity, color="black", linestyle="--", linewidth=1)
        ax.text(capacity, -0.5, f"{first.chip.name}: {capacity:.2f} GiB", ha="center", va="bottom", fontsize=9)
    ax.set(xlabel="GiB in memory at the fullest moment", xlim=(0, 1.3 * highest), ylim=(len(reports) - 0.5, -0.5))
    ax.set_yticks(range(len(reports)), list(reports), fontsize=10)
    ax.tick_params(axis="y", length=0)
    there = [category for category in COLOURS if any(category in sizes for sizes in peaks.values())]
    patches = [Patch(color=COLOURS[category], label=category) for category in there]
    fig.legend(handles=patches, loc="outside lower center", ncols=len(there), frameon=False, fontsize=9)
    fig.set_layout_engine("constrained")
    return fig


def peak_bars_alt(reports: Mapping[str, Report]) -> str:
    """Say what `peak_bars` shows."""
    peaks, words = _peaks(reports), []
    for name, report in reports.items():
        parts = ", ".join(f"{category} {size / GiB:.1f}" for category, size in peaks.get(name, {}).items())
        verdict = "fits" if report.fits else "does not fit"
        words.append(
            f"{name}: {report.peak_bytes / GiB:.1f}{f' ({parts})' if parts else ''}, {verdict}, {_work(report)}"
        )
    return f"Bars of memory at the peak, in GiB. {'; '.join(words)}."


def _work(report: Report) -> str:
    """Say how much work a program's products are, and whether those of kernels are left out."""
    products = "products outside kernels" if report.kernels else "products"
    return f"{report.matmul_flops / 1e12:.1f} TFLOP in {products}"


def _peaks(reports: Mapping[str, Report]) -> dict[str, dict[str, int]]:
    """Return by program the bytes of each category at its peak; nothing where a program has no timeline."""
    peaks: dict[str, dict[str, int]] = {}
    for name, report in reports.items():
        if report.timeline is None:
            return {}
        spans = report.timeline.at_peak()
        of_logits = {span.bytes for span in spans if span.category == "logits"}
        sizes = dict.fromkeys(COLOURS, 0)
        for span in spans:  # a TPU's compiler writes the logits' gradient down flat, which hides what it is
            sizes["logits" if span.category == "workspace" and span.bytes in of_logits else span.category] += span.bytes
        peaks[name] = {category: size for category, size in sizes.items() if size > 0.001 * report.peak_bytes}
    return peaks


def token_strip(tokens: Sequence[str], wrote: Iterable[bool]) -> Figure:
    """Draw the tokens of a chat in lines, each in a box: yellow where it is predicted with a loss, else only read."""
    places, x, row = [], 0.0, 0
    shown = [repr(token)[1:-1] for token in tokens]  # a line break as \n
    for token in shown:
        if x + len(token) > _CHARACTERS:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += len(token) + 1.8
    fig, ax = plt.subplots(figsize=(9.4, 0.36 * (row + 1) + 0.55))
    for token, (x, y), own in zip(shown, places, wrote, strict=True):
        box = {"boxstyle": "round,pad=0.22", "facecolor": "#ffa90e" if own else "#f2f2f2", "edgecolor": "none"}
        ax.text(x, y, token, va="center", fontsize=9, family="monospace", bbox=box)
    ax.set(xlim=(-1, _CHARACTERS + 5), ylim=(row + 0.6, -0.6))
    ax.axis("off")
    patches = [Patch(color="#ffa90e", label="predicted: has a loss"), Patch(color="#f2f2f2", label="only read")]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False, fontsize=9)
    return fig
