"""An explorer of plans for notebooks: the estimate's bars answer while you drag, a button asks the compiler."""

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets
import jax.numpy as jnp
import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from jaxmem import CHIPS, GiB
from llamem.llama import PRESETS, LlamaConfig
from llamem.llama.plan import Plan
from llamem.planner import Estimate, estimate
from llamem_course import plots

__all__ = ["Explorer", "estimate_bars", "estimate_bars_alt"]

# petroff10 as in timelines, and shades for three more; neighbours in the stack stay distinct for colour-blind readers.
COLOURS = {
    "weights": "#3f90da",
    "moments": "#92dadd",
    "adapters": "#d4b9da",
    "batch": "#b9ac70",
    "layer weights": "#e76300",
    "residuals": "#ffa90e",
    "gradients": "#a96b59",
    "head gradient": "#d9b3a6",
    "loss tiles": "#bd1f01",
    "attention": "#94a4a2",
    "feed-forward": "#717581",
    "stream": "#333333",
    "margin": "#dddddd",
}
_LENGTHS = [n * 1024 for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)]


def estimate_bars(estimates: Mapping[str, Estimate]) -> Figure:
    """Return the estimated peaks of several plans as horizontal bars of their lines, and the chips' capacities."""
    fig, ax = plt.subplots(figsize=(9.4, 0.62 * len(estimates) + 1.7), layout="constrained")
    names = [f"{name}  {one.peak_bytes / GiB:.1f} GiB" for name, one in estimates.items()]
    left, widest = [0.0] * len(names), max(one.peak_bytes for one in estimates.values()) / GiB
    for line, colour in COLOURS.items():
        sizes = [sum(part.bytes for part in one.lines if part.name == line) / GiB for one in estimates.values()]
        if max(sizes) > 0.002 * widest:  # a line that can be seen
            ax.barh(names, sizes, left=left, color=colour, edgecolor="white", label=line)
        for row, size in enumerate(sizes):
            if size > 0.0085 * widest * len(line):  # its name can be read
                dark = sum(to_rgb(colour)) < 1.5
                words = f"{line}\n{size:.1f}"
                at, white = left[row] + size / 2, "white" if dark else "black"
                ax.text(at, row, words, ha="center", va="center", fontsize=8, color=white)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for capacity in sorted({one.capacity_bytes for one in estimates.values() if one.capacity_bytes}):
        ax.axvline(capacity / GiB, color="black", linestyle="--", label=f"the chip offers {capacity / GiB:.2f} GiB")
    ax.invert_yaxis()
    ax.set_xlabel("estimated peak memory (GiB)")
    fig.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return fig


def estimate_bars_alt(estimates: Mapping[str, Estimate]) -> str:
    """Return what `estimate_bars` shows, in words."""
    told = []
    for name, one in estimates.items():
        largest = sorted(one.lines, key=lambda line: -line.bytes)[:3]
        parts = ", ".join(f"{line.name} {line.bytes / GiB:.1f}" for line in largest)
        told.append(f"{name}: {one.peak_bytes / GiB:.1f} GiB, of it {parts}.")
    return "Estimated peaks as bars of their lines. " + " ".join(told)


class Explorer:
    """Controls for a model, a chip, a batch and every tool of `llamem.Plan`; `box` is the widget to display.

    The estimate is drawn anew at each change. The button compiles for the chip, about ten seconds, and shows the
    compiler's peak, the estimate's lines and the timeline.
    """

    def __init__(self, model: str = "llama3.2-1b", chip: str = "v5e-1", seq_len: int = 131_072, plan: Plan = Plan()):
        def choice(name: str, options: Any, value: Any, kind: Any = widgets.Dropdown) -> Any:
            return kind(description=name, options=options, value=value, style={"description_width": "9em"})

        single = [name for name, chip in CHIPS.items() if chip.devices == 1]
        lengths = [(f"{n:,}", n) for n in sorted({*_LENGTHS, seq_len})]
        tiles, groups = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8)
        self.controls = {
            "model": choice("model", list(PRESETS), model),
            "chip": choice("chip", single, chip),
            "seq_len": choice("tokens", lengths, seq_len, widgets.SelectionSlider),
            "batch_size": widgets.IntSlider(1, 1, 64, description="batch", style={"description_width": "9em"}),
            "param_dtype": choice("weights", ("bfloat16", "float32"), "bfloat16"),
            "mode": choice("mode", ("scan", "nested"), plan.mode),
            "remat": choice("remat", ("nothing", "attn", "qkv_attn", "minimal", ("keep all", None)), plan.remat),
            "loss_tiles": choice("loss_tiles", ("auto", ("plain loss", None), *tiles), plan.loss_tiles),
            "head_groups": choice("head_groups", groups, plan.head_groups, widgets.SelectionSlider),
            "mlp_tiles": choice("mlp_tiles", tiles, plan.mlp_tiles, widgets.SelectionSlider),
            "offload": choice("offload", (("nothing", ()), ("block_in", ("block_in",))), plan.offload),
            "moments": choice("moments", ("device", "host"), plan.moments),
        }
        self.bars, self.answer = widgets.HTML(), widgets.Output()
        self.button = widgets.Button(description="ask the compiler", tooltip="compiles for the chip: about ten seconds")
        self.button.on_click(lambda _: self.ask())
        for control in self.controls.values():
            control.observe(lambda _: self.redraw(), names="value")
        half = (len(self.controls) + 1) // 2
        columns = list(self.controls.values())
        self.box = widgets.VBox(
            [
                widgets.HBox([widgets.VBox(columns[:half]), widgets.VBox(columns[half:])]),
                self.bars,
                self.button,
                self.answer,
            ]
        )
        self.redraw()

    @property
    def config(self) -> LlamaConfig:
        """The model that is chosen, with room for the chosen length."""
        config = PRESETS[self.controls["model"].value]
        length = max(config.max_seq_len, self.controls["seq_len"].value)
        dtype = jnp.dtype(self.controls["param_dtype"].value)
        return config.replace(param_dtype=dtype, compute_dtype=jnp.bfloat16, max_seq_len=length)

    @property
    def plan(self) -> Plan:
        """The plan that is chosen. Raises ValueError where its tools exclude each other."""
        names = ("mode", "remat", "loss_tiles", "head_groups", "mlp_tiles", "offload", "moments")
        return Plan(**{name: self.controls[name].value for name in names})

    def estimate(self) -> Estimate:
        """Return the estimate of what is chosen."""
        seq_len, batch_size = (self.controls[name].value for name in ("seq_len", "batch_size"))
        return estimate(self.config, self.plan, self.controls["chip"].value, seq_len=seq_len, batch_size=batch_size)

    def redraw(self) -> None:
        """Draws the estimate's bars anew; what cannot be is said instead."""
        try:
            self.bars.value = bars_html(self.estimate())
        except ValueError as error:
            self.bars.value = f"<p>{html.escape(str(error))}</p>"

    def ask(self) -> None:
        """Compiles what is chosen and shows the compiler's answer below the bars."""
        self.answer.clear_output()
        with self.answer:
            try:
                guess = self.estimate()
                print(f"asking {guess.chip.name}'s compiler about {guess.plan} ...")
                report = guess.compile()
            except (ValueError, RuntimeError, ImportError) as error:
                print(error)
                return
            verdict = "fits" if report.fits else "does not fit"
            print(f"the compiler: {verdict}, {report.peak_bytes / GiB:.2f} GiB; estimated {guess.peak_bytes / GiB:.2f}")
            if report.timeline is not None:
                display(guess)
                shown = {repr(guess.plan): report}
                plots.show(plots.timeline(shown), alt=plots.timeline_alt(shown))


def bars_html(one: Estimate) -> str:
    """Return the estimate as a bar of its lines against the chip's capacity, a legend, and the seconds."""
    capacity = one.capacity_bytes or one.peak_bytes
    whole = max(one.peak_bytes, capacity) * 1.02
    lines = [line for line in one.lines if line.bytes]
    spans = "".join(
        f'<div title="{line.name}: {line.bytes / GiB:.2f} GiB" '
        f'style="width:{100 * line.bytes / whole:.2f}%;background:{COLOURS[line.name]}"></div>'
        for line in lines
    )
    at_capacity = f"position:absolute;left:{100 * capacity / whole:.2f}%;top:-4px;bottom:-4px;border-left:2px dashed"
    mark = f'<div style="{at_capacity}"></div>'
    frame = "position:relative;display:flex;height:1.6em;max-width:52em;border:1px solid gray;margin:6px 0"
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{COLOURS[line.name]}">&#9632;</span> {line.name} '
        f"{line.bytes / GiB:.2f}</span>"
        for line in lines
    )
    verdict = "fits" if one.fits else "does not fit"
    title = (
        f"<b>{one.chip.name}: {verdict}, by estimate</b>: {one.peak_bytes / GiB:.2f} of {capacity / GiB:.2f} GiB, "
        f"fullest at {html.escape(one.peak_at)}; {one.host_bytes / GiB:.2f} GiB on the host; about "
        f"{one.seconds.total:.1f} s a step (roofline, not measured)"
    )
    aria = html.escape(estimate_bars_alt({"plan": one}), quote=True)
    return f'<p>{title}</p><div role="img" aria-label="{aria}" style="{frame}">{spans}{mark}</div><p>{legend}</p>'
