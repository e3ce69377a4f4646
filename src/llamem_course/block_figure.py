"""One Llama layer as a picture: what flows along each arrow, in bytes, and what each matrix weighs."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llamem.llama.config import LlamaConfig

MiB, GiB = 2**20, 2**30
_STREAM = 0.4  # height of the residual stream


@dataclasses.dataclass(frozen=True)
class Flow:
    """An array that flows in a layer, or one of its weights: its axes as letters, and its bytes."""

    axes: str
    bytes: int

    def __str__(self) -> str:
        size = f"{self.bytes / GiB:.1f} GiB" if self.bytes >= GiB else f"{self.bytes / MiB:.0f} MiB"
        return f"[{', '.join(self.axes)}] {size}"


def block_flows(config: LlamaConfig, tokens: int) -> dict[str, Flow]:
    """Return the activations and weights of one dense layer that reads `tokens` tokens of one sequence, by name.

    Activations have the names of `llama.ACTIVATIONS` and the type the layers compute in; `x` is the residual
    stream, `normed` what leaves a norm, `hidden` what enters `w_down`, `scores` the attention scores of all heads,
    which plain attention writes down in f32. Weights have the type `config.param_dtype`.
    """
    sizes = dict(T=tokens, S=tokens, D=config.d_model, F=config.d_ff)
    sizes |= dict(H=config.n_heads, K=config.n_kv_heads, h=config.head_dim)

    def flow(axes: str, dtype: Any) -> Flow:
        count = jnp.dtype(dtype).itemsize
        for axis in axes:
            count *= sizes[axis]
        return Flow(axes, count)

    activations = dict(x="TD", normed="TD", q="THh", k="TKh", v="TKh", attn="THh", attn_out="TD")
    activations |= dict(gate="TF", up="TF", hidden="TF", mlp_out="TD")
    weights = dict(wq="DHh", wk="DKh", wv="DKh", wo="HhD", w_gate="DF", w_up="DF", w_down="FD")
    flows = {name: flow(axes, config.compute_dtype) for name, axes in activations.items()}
    flows |= {name: flow(axes, config.param_dtype) for name, axes in weights.items()}
    return flows | {"scores": flow("HTS", jnp.float32)}


def block(config: LlamaConfig, tokens: int) -> Figure:
    """One Llama layer, with the shape and the bytes of what flows along each arrow; `block_alt` says it in words.

    Arrows are as thick as the square root of their bytes.
    """
    flows = block_flows(config, tokens)
    fig, (above, below) = plt.subplots(2, 1, figsize=(10.5, 7.2), layout="constrained")
    for ax in (above, below):
        ax.set(xlim=(0, 10.5), ylim=(0, 4.2))
        ax.axis("off")
    _attention(above, flows)
    _feed_forward(below, flows)
    title = f"One of {config.n_layers} layers, reading {tokens:,} tokens: activations in blue, weights in boxes"
    fig.suptitle(title, fontsize=11)
    return fig


def block_alt(config: LlamaConfig, tokens: int) -> str:
    """Return what `block` shows, in words."""
    words = ", ".join(f"{name} {flow}" for name, flow in block_flows(config, tokens).items())
    return (
        "A Llama layer. From the residual stream x: norm, queries, keys and values, attention, wo, added to x; then "
        f"norm, gate and up, their product, w_down, added to x. Sizes: {words}."
    )


def _arrow(
    ax: Axes, flow: Flow, start: tuple[float, float], end: tuple[float, float], name: str = "", dx=0.0, dy=0.1
) -> None:
    width = max(0.8, 0.45 * (flow.bytes / MiB) ** 0.5)
    style = {"arrowstyle": "-|>", "mutation_scale": 8 + width, "linewidth": width, "color": "#3f90da"}
    ax.annotate("", end, start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, zorder=1)
    if name:
        middle = ((start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2 + dy)
        frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
        text = f"{name}\n{flow}"
        ax.text(*middle, text, ha="center", va="bottom" if dy >= 0 else "top", fontsize=8, zorder=4, bbox=frame)


def _box(ax: Axes, x: float, y: float, text: str, weight: Flow | None = None) -> None:
    frame = {"boxstyle": "round,pad=0.35", "facecolor": "#f3e3c3" if weight else "#e6e6e6", "edgecolor": "0.3"}
    ax.text(x, y, f"{text}\n{weight}" if weight else text, ha="center", va="center", fontsize=8, bbox=frame, zorder=3)


def _stream(ax: Axes, flow: Flow, leaves: float, joins: float, adds: str) -> None:
    _arrow(ax, flow, (0.05, _STREAM), (joins - 0.12, _STREAM))
    _arrow(ax, flow, (joins + 0.12, _STREAM), (10.45, _STREAM))
    ax.text((leaves + joins) / 2, _STREAM - 0.12, f"residual stream x {flow}", ha="center", va="top", fontsize=8.5)
    ax.plot(joins, _STREAM, "o", markersize=15, markerfacecolor="white", markeredgecolor="0.3", zorder=3)
    ax.text(joins, _STREAM - 0.01, "+", ha="center", va="center", fontsize=12, zorder=4)
    ax.text(joins + 0.22, _STREAM + 0.5, adds, fontsize=8, va="center")


def _attention(ax: Axes, flows: dict[str, Flow]) -> None:
    _stream(ax, flows["x"], 0.6, 9.7, f"attn_out\n{flows['attn_out']}")
    _arrow(ax, flows["x"], (0.6, _STREAM), (0.6, 1.95))
    _box(ax, 0.6, 2.2, "norm")
    for name, y in (("q", 3.6), ("k", 2.2), ("v", 1.2)):
        _arrow(ax, flows["normed"], (0.9, 2.2), (2.0, y), "normed" if name == "q" else "", dx=-0.45, dy=0.35)
        turned = "" if name == "v" else ", RoPE"
        _box(ax, 2.75, y, f"w{name}{turned}", flows[f"w{name}"])
        end = 2.2 + 0.25 * (y - 2.2)
        dx, dy = {"q": (0.4, 0.16), "k": (0.0, 0.16), "v": (0.2, -0.2)}[name]
        _arrow(ax, flows[name], (3.5, y), (5.5, end), name, dx, dy)
    scores = flows["scores"]
    _box(ax, 6.25, 2.2, f"attention\n\nscores {scores}\nif written down")
    _arrow(ax, flows["attn"], (7.1, 2.2), (8.9, 2.2), "attn", dy=0.2)
    _box(ax, 9.7, 2.2, "wo", flows["wo"])
    _arrow(ax, flows["attn_out"], (9.7, 1.9), (9.7, _STREAM + 0.2))


def _feed_forward(ax: Axes, flows: dict[str, Flow]) -> None:
    _stream(ax, flows["x"], 0.6, 9.7, f"mlp_out\n{flows['mlp_out']}")
    _arrow(ax, flows["x"], (0.6, _STREAM), (0.6, 2.15))
    _box(ax, 0.6, 2.4, "norm")
    for name, y in (("gate", 3.3), ("up", 1.5)):
        _arrow(ax, flows["normed"], (0.9, 2.4), (2.0, y), "normed" if name == "gate" else "", dx=-0.45, dy=0.3)
        _box(ax, 2.75, y, f"w_{name}", flows[f"w_{name}"])
        _arrow(ax, flows[name], (3.55, y), (5.6, 2.4 + 0.3 * (y - 2.4)), name, dy=0.25 if name == "gate" else -0.3)
    _box(ax, 6.1, 2.4, "silu(gate)\n× up")
    _arrow(ax, flows["hidden"], (6.7, 2.4), (8.8, 2.4), "hidden", dy=0.25)
    _box(ax, 9.7, 2.4, "w_down", flows["w_down"])
    _arrow(ax, flows["mlp_out"], (9.7, 2.1), (9.7, _STREAM + 0.2))
