"""Which axis to tile, and into how many tiles: a roofline model of the loss.

A tile must be large enough that its matrix products outlast its memory traffic, and small enough for the budget.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from llamem.layers.tiling import floating_type
from llamem.losses.arguments import one_of, whole
from llamem.losses.one_tile import Tiles
from llamem.memory.chips import CHIPS, Chip, compiling_for

__all__ = ["TileChoice", "choose_tiles"]

# Of a CPU with a few cores, and of an accelerator that is not in `llamem.CHIPS`: orders of magnitude.
_CPU = Chip("cpu", "cpu", "cpu", 16 * 10**9, 200e9, 20e9)
_UNKNOWN = CHIPS["h100"]
_BUDGET_SHARE = 1 / 16  # of device memory, for what the loss needs beyond its operands and gradients
_LEAST_ROWS, _ALIGN = 512, 256  # a v6e multiplies blocks of 256 by 256
# An unaligned tile of the vocabulary makes the TPU compiler lay the head out anew: a copy of all of it.
_VOCAB_ALIGN = 128
# Of a CPU's tile of 512 tokens: 4 MB of logits, which a cache holds. No power of two, and not aligned to one: rows of
# logits that lie a power of two apart compete for the same cache lines.
_CPU_COLUMNS, _CPU_ALIGN = 2008, 8


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """A way to tile the loss, what it costs, and why it was taken."""

    axis: Literal["tokens", "vocab"]
    num_tiles: int
    products: int  # matrix products of 2NDV FLOPs, for the loss and its gradients
    workspace_bytes: int  # beyond operands and gradients, by the model
    relative_time: float  # 1 is one product at the chip's peak
    reason: str


def _chip(name: str | None) -> Chip:
    if name is None:
        kind = compiling_for()
        known = (chip for chip in (_CPU, *CHIPS.values()) if chip.device_kind.lower() == kind.lower())
        return next(known, _UNKNOWN)
    chips = {"cpu": _CPU, **CHIPS}
    if not isinstance(name, str) or name not in chips:
        raise ValueError(f"chip {name!r} is no chip this knows: give one of {', '.join(chips)}, or None.")
    return chips[name]


def tiles_for_chip(
    axis: Literal["tokens", "vocab"], num_tiles: int, accumulate_dtype: Any, vocab_axis: str | None = None
) -> Tiles:
    """How the chip that compiles works on this many tiles: a CPU on a cache-full of columns, others on whole rows."""
    if _chip(None) is _CPU:
        return Tiles(axis, num_tiles, _CPU_COLUMNS, _CPU_ALIGN, accumulate_dtype, vocab_axis)
    return Tiles(axis, num_tiles, None, _VOCAB_ALIGN, accumulate_dtype, vocab_axis)


_COLUMNS = 2048  # of a tile of tokens that is worked on in columns, where the chip is no CPU
_KEPT_SHARE = 1 / 8  # of the head's bytes, for the logits that such a tile keeps


def tiles_in_columns(
    num_tiles: int | Literal["auto"], tokens: int, d_model: int, vocab: int, size: int, accumulate_dtype: Any
) -> Tiles:
    """Tiles of tokens that are worked on in columns on every chip, with gradients of `size` bytes a number.

    "auto": the rows at which the chip's balance is reached, but no more than keep a sixth of the head's bytes. Each
    tile reads the head twice, reads and writes the head's gradient, writes its logits and reads them.
    """
    chip = _chip(None)
    columns, align = (_CPU_COLUMNS, _CPU_ALIGN) if chip is _CPU else (_COLUMNS, _VOCAB_ALIGN)
    if num_tiles == "auto":
        assert chip.peak_flops and chip.bandwidth  # every chip of the table has them
        fixed = (2 * size + 2 * size) * d_model
        rows = _size(chip.peak_flops / chip.bandwidth, 6.0 * d_model, fixed, 2.0 * size)
        affordable = _KEPT_SHARE * d_model
        num_tiles = max(1, -(-tokens // int(max(_ALIGN, min(rows, affordable)))))
    return Tiles("tokens", num_tiles, min(columns, vocab), align, accumulate_dtype)


def _at_least(name: str, value: Any, least: int) -> int:
    found = whole(name, value, "a whole number")
    if found < least:
        raise ValueError(f"{name} must be at least {least}, got {found}.")
    return found


class _Pass(NamedTuple):
    """One pass over all tiles: its matrix products, and the bytes that a tile moves."""

    products: int
    operand: int  # for each number of the matrix that every tile needs whole: the head, or hidden
    logit: int  # for each logit of the tile


def _passes(axis: str, trained: bool, reduction: str, size: int) -> list[_Pass]:
    """What the losses and their gradients take, in numbers of `size` bytes; logits and sums are float32.

    As XLA fuses a tile for TPUs: the product writes the logits and finds their maxima, the sum of exponentials reads
    them. In a tile of tokens each product of a gradient reads them again and makes softmax minus labels on the way. In
    a tile of the vocabulary the product that makes the logits anew writes softmax minus labels instead, in the type of
    the products, which read it.
    """
    write, read, update = 4, 4, 8
    losses = _Pass(1, size, write + read)
    if axis == "tokens" and not trained:
        return [_Pass(2, 2 * size, write + read + read)]
    if axis == "tokens":
        once = _Pass(3, 2 * size + update, write + read + 2 * read)
        return [losses, once] if reduction == "none" else [once]
    if not trained:
        return [_Pass(2, size + update, write + read + read)]
    return [losses, _Pass(3, 2 * size + update, 3 * size)]


def _size(balance: float, work: float, fixed: float, traffic: float) -> float:
    """Rows from which a tile of `work` FLOPs and `fixed / rows + traffic` bytes per row reaches the chip's balance.

    A model too narrow to ever reach it gets the rows that come within a tenth of what it can.
    """
    wanted = min(balance, 0.9 * work / traffic)
    return fixed * wanted / (work - traffic * wanted)


def choose_tiles(
    tokens: int,
    d_model: int,
    vocab: int,
    *,
    dtype: Any = jnp.bfloat16,
    head: Literal["trained", "frozen"] = "trained",
    reduction: Literal["mean", "sum", "none"] = "mean",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    chip: str | None = None,
    memory_budget: int | None = None,
) -> TileChoice:
    """The cheapest way to tile the loss that fits the budget, by a roofline model.

    Tiles of tokens: 3 products (4 for `reduction="none"`), every tile reads the head twice and updates its float32
    gradient, which takes `4VD` bytes where the head is narrower. Tiles of the vocabulary: 4 products, every tile
    reads `hidden` three times and updates its float32 gradient, `4ND` bytes. A frozen head: 2 products either way.

    Args:
        tokens: N, tokens on one device.
        d_model: D.
        vocab: V, rows of the head on one device.
        dtype: of hidden and head.
        head: "frozen" when no gradient for it is wanted.
        reduction: of the loss; "none" has to compute the logits twice.
        axis: restrict the choice to one axis.
        chip: "cpu" or a chip of `llamem.CHIPS` such as "v6e-1"; None for the one that compiles.
        memory_budget: bytes for what the loss needs beyond operands and gradients; None for 1/16 of the chip's.

    The model is checked against no measurement of time but published ones: see notebook 04.
    """
    tokens = _at_least("tokens", tokens, 0)
    d_model, vocab = _at_least("d_model", d_model, 1), _at_least("vocab", vocab, 1)
    one_of("head", head, ("trained", "frozen"))
    one_of("reduction", reduction, ("mean", "sum", "none"))
    one_of("axis", axis, ("auto", "tokens", "vocab"))
    chosen = _chip(chip)
    assert chosen.peak_flops and chosen.bandwidth and chosen.capacity_bytes  # every chosen of the table has them
    balance, size = chosen.peak_flops / chosen.bandwidth, floating_type("dtype", dtype).itemsize
    budget = int(chosen.capacity_bytes * _BUDGET_SHARE)
    if memory_budget is not None:
        budget = _at_least("memory_budget", memory_budget, 1)
    trained, small = head == "trained", size < 4

    def candidate(axis: Literal["tokens", "vocab"], budget: int) -> TileChoice:
        passes = _passes(axis, trained, reduction, size)
        products = sum(one.products for one in passes)
        # Per tile and column of the product: FLOPs per row, bytes that do not depend on its rows, bytes per row.
        work, traffic = 2.0 * products * d_model, sum(one.logit for one in passes)
        fixed = sum(one.operand for one in passes) * d_model
        if axis == "tokens":
            extent, other = tokens, vocab
            base = 4 * vocab * d_model if trained and small else 0
        else:
            extent, other = vocab, max(1, tokens)
            base = 4 * tokens * d_model
        # Logits in float32, and their gradient in the type of the products; where a tile is worked on in columns, the
        # gradient is as narrow as they are.
        per_row = (4 if chosen is _CPU and axis == "tokens" else 4 + min(size, 4)) * other
        wanted = max(_size(balance, work, fixed, traffic), _LEAST_ROWS)
        affordable = max(budget - base, 0) // per_row
        aligned = min(-(-int(wanted) // _ALIGN), affordable // _ALIGN) * _ALIGN
        rows = max(1, min(extent, max(_ALIGN, aligned)))
        intensity = work * rows / (fixed + traffic * rows)
        time = products * max(1.0, balance / intensity)
        return TileChoice(axis, max(1, -(-extent // rows)), products, int(base + per_row * rows), time, "")

    axes: tuple = ("tokens", "vocab") if axis == "auto" else (axis,)
    granted = budget
    while not (fitting := [o for o in (candidate(a, granted) for a in axes) if o.workspace_bytes <= granted]):
        granted *= 2
    best = min(fitting, key=lambda o: o.relative_time)
    note = "" if granted == budget else f" (nothing fits it: taken as {granted / 2**20:.0f} MiB)"
    lines = [
        f"{chosen.name}: {balance:.0f} FLOPs per byte; N={tokens}, D={d_model}, V={vocab}; "
        f"budget {budget / 2**20:.0f} MiB{note}."
    ]
    for option in (candidate(a, granted) for a in axes):
        verdict = "taken" if option == best else "too large" if option not in fitting else "slower, or no faster"
        lines.append(
            f"  {option.axis}: {option.num_tiles} tiles, {option.products} products, "
            f"{option.workspace_bytes / 2**20:.0f} MiB, time {option.relative_time:.2f} -> {verdict}"
        )
    return dataclasses.replace(best, reason="\n".join(lines))
