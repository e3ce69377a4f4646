"""Which axis to tile, and into how many tiles: a roofline model of the loss.

A tile must be large enough that its matrix products outlast its memory traffic, and small enough for the budget.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmem.chips.chip import CHIPS, Chip, compiling_for, device_memory
from jaxmem.common.checks import check_one_of, check_whole

__all__ = ["TileChoice", "choose_tiles", "resolve_tiles"]

# A CPU with a few cores, to the order of magnitude. Its exponentials take longer than its memory, hence few bytes per
# second: the faster axis is then the one measured from D = 64 (vocabulary) to 1,024 (tokens); at 256 they are equal.
_CPU = Chip("cpu", "cpu", "cpu", 16 * 10**9, 200e9, 4e9)
_BUDGET_SHARE = 1 / 16  # of device memory, for what the loss needs beyond its operands and gradients
_LEAST_ROWS, _ALIGN = 512, 256  # a v6e multiplies blocks of 256 by 256


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """A way to tile the loss, what it costs, and why it was taken."""

    axis: Literal["tokens", "vocab"]
    num_tiles: int
    products: int  # matrix products of 2NDV FLOPs, for the loss and its gradients
    workspace_bytes: int  # beyond operands and gradients, by the model
    relative_time: float  # 1 is one product at the chip's peak
    reason: str


def _costs(axis: str, trained: bool, size: int) -> tuple[int, int, int]:
    """Return what all tiles of an axis do: matrix products; the bytes that a tile moves for each number of the matrix
    that every tile needs whole, the head or hidden, and for each of its logits.

    Factors of products are numbers of `size` bytes; logits and sums are float32.

    As XLA fuses a tile for TPUs: the product writes the logits and finds their maxima, the sum of exponentials reads
    them. In a tile of tokens each product of a gradient reads them again and makes softmax minus labels on the way. In
    a tile of the vocabulary the product that makes the logits anew writes softmax minus labels instead, in the type of
    the products, which read it.
    """
    write, read, update = 4, 4, 8
    if axis == "tokens":
        return (3, 2 * size + update, write + 3 * read) if trained else (2, 2 * size, write + 2 * read)
    if not trained:
        return 2, size + update, write + 2 * read
    return 4, size + 2 * size + update, write + read + 3 * size


def _rows_at_balance(balance: float, work: float, fixed: float, traffic: float) -> float:
    """Return the rows from which a tile of `work` FLOPs and `fixed / rows + traffic` bytes per row reaches the balance.

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
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    chip: str | None = None,
    memory_budget: int | None = None,
) -> TileChoice:
    """Return the fastest way to tile the loss that fits the budget, by a roofline model.

    Tiles of tokens: 3 products, every tile reads the head twice and updates its float32 gradient, which takes `4VD`
    bytes where the head is narrower. Tiles of the vocabulary: 4 products, every tile reads `hidden` three times and
    updates its float32 gradient, `4ND` bytes. A frozen head: 2 products either way. More than 512 tokens, or ids, are
    cut at least into four, so that all logits are never there at once.

    Args:
        tokens: N, tokens on one device.
        d_model: D.
        vocab: V, rows of the head on one device.
        dtype: of hidden and head.
        head: "frozen" when no gradient for it is wanted.
        axis: restrict the choice to one axis.
        chip: "cpu" or a chip of `jaxmem.CHIPS` such as "v6e-1"; None for the one that compiles. A chip that is in no
            table is judged by its own memory and an H100's FLOPs per byte.
        memory_budget: bytes for what the loss needs beyond operands and gradients; None for 1/16 of the chip's.

    The model is checked against no measurement of time but published ones: see notebook 04.
    """
    tokens = check_whole("tokens", tokens, at_least=0)
    d_model, vocab = check_whole("d_model", d_model), check_whole("vocab", vocab)
    trained = check_one_of("head", head, ("trained", "frozen")) == "trained"
    check_one_of("axis", axis, ("auto", "tokens", "vocab"))
    device = _chip(chip)
    size = jax.dtypes.canonicalize_dtype(dtype).itemsize
    assert device.capacity_bytes  # `_chip` sees to it
    budget = int(device.capacity_bytes * _BUDGET_SHARE)
    if memory_budget is not None:
        budget = check_whole("memory_budget", memory_budget)
    axes: tuple = ("tokens", "vocab") if axis == "auto" else (axis,)
    granted = budget
    while True:
        options = [_option(a, granted, device, (tokens, d_model, vocab), trained, size) for a in axes]
        fitting = [option for option in options if option.workspace_bytes <= granted]
        if fitting:
            break
        granted *= 2
    best = min(fitting, key=lambda option: option.relative_time)
    note = "" if granted == budget else f" (nothing fits it: taken as {granted / 2**20:.0f} MiB)"
    lines = [
        f"{device.name}: {_balance(device):.0f} FLOPs per byte; N={tokens}, D={d_model}, V={vocab}; "
        f"budget {budget / 2**20:.0f} MiB{note}."
    ]
    for option in options:
        verdict = "taken" if option is best else "too large" if option not in fitting else "slower, or no faster"
        lines.append(
            f"  {option.axis}: {option.num_tiles} tiles, {option.products} products, "
            f"{option.workspace_bytes / 2**20:.0f} MiB, time {option.relative_time:.2f} -> {verdict}"
        )
    return dataclasses.replace(best, reason="\n".join(lines))


def resolve_tiles(
    num_tiles: int | Literal["auto"],
    axis: Literal["auto", "tokens", "vocab"],
    shape: tuple[int, int, int],
    *,
    dtype: Any,
    head_trained: bool,
    head_parts: int = 1,
    with_entropy: bool = False,
    chip: str | None = None,
) -> tuple[Literal["tokens", "vocab"], int]:
    """Return the axis and the number of tiles of a loss: those given, or what `choose_tiles` finds.

    This is the one place where it is decided: for the losses, and for the planner, which asks about a chip.

    Args:
        num_tiles: a number, or "auto".
        axis: of the tiles, or "auto", which is "tokens" for a given number.
        shape: N, D and V, of what one device has.
        dtype: of the factors of matrix products.
        head_trained: whether all of the head is; else it is frozen, or one of its matrices is trained beside others.
        head_parts: matrices that stand side by side as the head.
        with_entropy: whether the loss may differentiate the entropy.
        chip: see `choose_tiles`.
    """
    if num_tiles != "auto":
        return "vocab" if axis == "vocab" else "tokens", check_whole("num_tiles", num_tiles)
    budget = None
    if not head_trained and axis == "auto" and (head_parts > 1 or with_entropy):
        axis = "tokens"  # tiles of the vocabulary would make their logits a second time
    if not head_trained and with_entropy:
        # The tile is then all that is large: a quarter of the head's own bytes is enough for it.
        budget = max(1, shape[2] * shape[1] * jax.dtypes.canonicalize_dtype(dtype).itemsize // 4)
    head = "trained" if head_trained else "frozen"
    choice = choose_tiles(*shape, dtype=dtype, head=head, axis=axis, chip=chip, memory_budget=budget)
    return choice.axis, choice.num_tiles


def _option(
    axis: Literal["tokens", "vocab"], budget: int, chip: Chip, shape: tuple[int, int, int], trained: bool, size: int
) -> TileChoice:
    """Return the best tiles of one axis, within the budget where that is possible."""
    tokens, d_model, vocab = shape
    (products, operand, traffic), balance = _costs(axis, trained, size), _balance(chip)
    # For each column of a tile's product: FLOPs per row, bytes whatever the rows, and as `traffic` bytes per row.
    work, fixed = 2.0 * products * d_model, operand * d_model
    if chip is _CPU and axis == "vocab":
        traffic = 8  # of two passes over exponentials; all else finds so small a tile in the cache
    if axis == "tokens":
        extent, other = tokens, vocab
        base = 4 * vocab * d_model if trained and size < 4 else 0
    else:
        extent, other = vocab, max(1, tokens)
        base = 4 * tokens * d_model
    per_row = (4 + min(size, 4)) * other  # logits in float32, and their gradient in the type of the products
    wanted = max(_rows_at_balance(balance, work, fixed, traffic), _LEAST_ROWS)
    wanted = min(wanted, max(-(-extent // 4), _LEAST_ROWS))
    affordable = max(budget - base, 0) // per_row
    aligned = min(-(-int(wanted) // _ALIGN), affordable // _ALIGN) * _ALIGN
    rows = max(1, min(extent, max(_ALIGN, aligned)))
    time = products * max(1.0, balance * (fixed + traffic * rows) / (work * rows))
    return TileChoice(axis, max(1, -(-extent // rows)), products, int(base + per_row * rows), time, "")


def _balance(chip: Chip) -> float:
    assert chip.peak_flops and chip.bandwidth  # every chip of the table has them
    return chip.peak_flops / chip.bandwidth


def _chip(name: str | None) -> Chip:
    """Return a chip by name, or the one that the program being traced is for."""
    chips = {"cpu": _CPU, **CHIPS}
    if name is not None:
        if not isinstance(name, str) or name not in chips:
            raise ValueError(f"chip {name!r} is no chip this knows: give one of {', '.join(chips)}, or None.")
        return chips[name]
    kind = compiling_for()
    known = next((chip for chip in chips.values() if chip.device_kind.lower() == kind.lower()), None)
    if known is not None:
        return known
    memory = device_memory() or _CPU.capacity_bytes
    return dataclasses.replace(CHIPS["h100"], name=kind, device_kind=kind, capacity_bytes=memory)
