"""The figures of notebook 11: who computes what on a mesh, and what each mesh needs of a chip and its links."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llamem.llama.plan import MeshShape

Rows = Mapping[str, Mapping[str, float]]


def mesh_maps(meshes: Mapping[str, Mapping[str, int]]) -> tuple[Figure, str]:
    """Draw what each chip of some meshes computes, and return the figure and its words.

    A frame is a sequence, its tokens from left to right; a strip of it is a part of every matrix. Each piece has the
    number and the colour of its chip. A chip of `context` has a part of the beginning and one of the end.
    """
    fig, axes = plt.subplots(1, len(meshes), figsize=(9, 3.4), layout="constrained")
    for ax, (name, sizes) in zip(axes, meshes.items(), strict=True):
        mesh = MeshShape.of(sizes)
        wide, high = 2 * mesh.context if mesh.context > 1 else 1, mesh.tensor
        for sequence in range(mesh.fsdp):
            for strip in range(high):
                for part in range(wide):
                    token = min(part, wide - 1 - part)
                    chip = (sequence * mesh.context + token) * high + strip
                    place = part / wide, sequence + 0.84 * strip / high
                    size = 1 / wide, 0.84 / high
                    ax.add_patch(plt.Rectangle(place, *size, facecolor=f"C{chip}", alpha=0.45, edgecolor="white"))
                    middle = place[0] + size[0] / 2, place[1] + size[1] / 2
                    ax.text(*middle, str(chip), ha="center", va="center", fontsize=9 if mesh.devices > 4 else 11)
            ax.add_patch(plt.Rectangle((0, sequence), 1, 0.84, fill=False, edgecolor="black", linewidth=1.2))
        ax.set_xlim(-0.01, 1.01)
        ax.set_ylim(mesh.fsdp - 0.1, -0.06)
        tokens = f"1/{mesh.context} of the tokens" if mesh.context > 1 else "all tokens"
        matrices = f"1/{mesh.tensor} of each matrix" if mesh.tensor > 1 else "whole matrices"
        ax.set_title(name, loc="left", fontsize=11, fontweight="bold", pad=20)
        ax.text(0, 1.03, f"a chip: {tokens}, {matrices}", transform=ax.transAxes, fontsize=9.5)
        ax.set_yticks([n + 0.42 for n in range(mesh.fsdp)], range(1, mesh.fsdp + 1))
        ax.set_xticks([])
        ax.set_xlabel("tokens of a sequence →")
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    axes[0].set_ylabel("sequence")
    told = "; ".join(f"{name}: {MeshShape.of(sizes).fsdp} sequences at once" for name, sizes in meshes.items())
    return fig, f"The numbers of the chips that compute each sequence, by its tokens and parts of matrices. {told}."


def mesh_bars(panels: Mapping[str, tuple[Rows, tuple[float, str]]]) -> tuple[Figure, str]:
    """Draw a bar a mesh in each panel, to scale, with the sizes of its parts; return the figure and its words.

    `panels` are, by what is measured, sizes by mesh and part, and where a dashed line stands and what it says.
    """
    names = list(next(iter(panels.values()))[0])
    size = 10, 0.62 * len(names) + 1.4
    fig, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained", squeeze=False)
    first_color, told = 0, []
    for ax, (what, (rows, line)) in zip(axes.flat, panels.items(), strict=True):
        first_color = _bars(ax, rows, line, first_color)
        ax.set_xlabel(what)
        sizes = (
            f"{name}: {sum(parts.values()):.1f}, of it {', '.join(f'{part} {x:.1f}' for part, x in parts.items() if x)}"
            for name, parts in rows.items()
        )
        told.append(f"{what}. {'; '.join(sizes)}. A line: {line[1]}.")
    axes[0, 0].invert_yaxis()
    return fig, "Bars for each mesh. " + " ".join(told)


def _bars(ax: Axes, rows: Rows, line: tuple[float, str], first_color: int) -> int:
    """Draw one panel, and return the number of the next colour. Each part is named over a bar in which it is long."""
    totals = [sum(parts.values()) for parts in rows.values()]
    widest, starts, named = max(*totals, line[0]), [0.0] * len(rows), set[int]()
    parts = list(next(iter(rows.values())))
    for number, part in enumerate(parts):
        sizes, color = [parts_of[part] for parts_of in rows.values()], f"C{first_color + number}"
        bars = ax.barh([*rows], sizes, left=starts, height=0.5, color=color)
        for bar, size, total in zip(bars, sizes, totals, strict=True):
            if 0.07 * widest < size < 0.99 * total:  # there is room, and it is not the number at the end
                place = bar.get_x() + size / 2, bar.get_y() + bar.get_height() / 2
                light = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
                ax.text(*place, f"{size:.1f}", ha="center", va="center", fontsize=10, bbox=light)
        longest = max(set(range(len(sizes))) - named, key=lambda row: (sizes[row], -row))
        named.add(longest)
        ax.text(starts[longest], longest - 0.28, part, color=color, fontsize=10, va="bottom", weight="bold")
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, total in enumerate(totals):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the dashed line
        ax.text(total + 0.012 * widest, place, f"{total:.1f}", va="center", fontsize=10, weight="bold", bbox=box)
    ax.set_xlim(0, 1.15 * widest)
    ax.axvline(line[0], color="black", linestyle="--", linewidth=1)
    ax.text(line[0], 1.0, line[1], transform=ax.get_xaxis_transform(), ha="right", va="bottom", fontsize=10)
    return first_color + len(parts) + 1  # the next colour is a grey
