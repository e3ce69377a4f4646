"""The figures of notebook 10: what fills the chip while a program runs, and which proof finds which program."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from jaxmem.reading.timeline import Timeline
from jaxmem.report import GiB, Report
from llamem_course.timeline_figure import COLOURS, passes_drawn, timelines


def plateaus(reports: Mapping[str, Report | Timeline], notes: Mapping[str, str]) -> tuple[Figure, str]:
    """Draw memory over each program, side by side on one axis of GiB, and return the figure and its words.

    What was kept, what is computed again and all else each have a colour; `notes` are a sentence on each program.
    """
    found = timelines(reports)
    fig, axes = plt.subplots(1, len(found), figsize=(9, 3.3), sharey=True, layout="constrained", squeeze=False)
    told = []
    for ax, (name, one) in zip(axes.flat, found.items(), strict=True):
        areas = one.by_category()
        rest = sum((row for kind, row in areas.items() if kind not in ("residuals", "rematerialised")), np.zeros(1))
        edges, base = np.arange(one.steps + 1), np.zeros(one.steps)
        for kind, sizes in (("output", rest), *((k, areas.get(k)) for k in ("residuals", "rematerialised"))):
            if sizes is None:
                continue
            top = base + sizes / GiB
            lower, upper = np.append(base, base[-1]), np.append(top, top[-1])
            ax.fill_between(edges, lower, upper, step="post", color=COLOURS[kind], linewidth=0)
            base = top
        ax.step(edges, np.append(base, base[-1]), where="post", color="black", linewidth=0.8)
        ax.set_xlim(0, one.steps)
        ax.set_xticks([])
        for name_of_pass, first, end in passes_drawn(one):
            if first:
                ax.axvline(first, color="black", linewidth=0.8, linestyle=":")
            if end - first > 0.15 * one.steps:
                ax.text(
                    (first + end) / 2, -0.02, name_of_pass, va="top", ha="center", transform=ax.get_xaxis_transform()
                )
        peak = one.peak_bytes / GiB
        ax.set_title(f"{name}\npeak {peak:.1f} GiB", loc="left", fontsize=11, fontweight="bold")
        low = peak < 0.5 * max(other.peak_bytes for other in found.values()) / GiB
        plateau = np.flatnonzero(base > peak / 2).mean()
        place = (one.steps / 2, peak + 0.5) if low else (plateau, 0.5 * peak)
        frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 3}
        ax.text(*place, notes[name], ha="center", va="bottom" if low else "center", fontsize=10, bbox=frame)
        told.append(f"{name}: peak {peak:.1f}, {notes[name]}".replace("\n", " "))
    axes[0, 0].set_ylabel("GiB in use on a v5e")
    return fig, "Memory in use while three compiled programs run. " + "; ".join(told) + "."


def proof_grid(marks: Mapping[str, Mapping[str, str]]) -> tuple[Figure, str]:
    """Draw what is not "ok" of each program's proofs (`marks`, by name), and return the figure and its words."""
    proofs = list(next(iter(marks.values())))
    fig, ax = plt.subplots(figsize=(9, 0.36 * len(proofs) + 0.8), layout="constrained")
    looks = {"ok": ("#eef3ee", "white", ""), "FAILED": (COLOURS["logits"], "white", "fails")}
    for column, found in enumerate(marks.values()):
        for row, proof in enumerate(proofs):
            color, letters, word = looks.get(found[proof], ("0.85", "black", found[proof].replace(" ", "\n")))
            square = {"facecolor": color, "edgecolor": "white", "linewidth": 2}
            ax.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, **square))
            if word:
                ax.text(column, row, word, ha="center", va="center", color=letters, fontsize=8.5, linespacing=0.95)
    ax.set_xlim(-0.5, len(marks) - 0.5)
    ax.set_ylim(len(proofs) - 0.5, -0.5)
    ax.set_yticks(range(len(proofs)), proofs, fontsize=10)
    ax.set_xticks(range(len(marks)), [name.replace(" ", "\n", 1) for name in marks], fontsize=10)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    words = {name: [f"{p} {m}" for p, m in found.items() if m != "ok"] for name, found in marks.items()}
    told = "; ".join(f"{name}: {', '.join(found) or 'all ok'}" for name, found in words.items())
    return fig, f"A grid of {len(proofs)} proofs and {len(marks)} programs. {told}."
