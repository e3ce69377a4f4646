"""What compilers write down beside the weights themselves: copies in another type or layout, gradients zeroed early.

Each line was read off the compilers' timelines (`Report.timeline`), most of them of benchmarks/estimates.py's cases.
"""

from llamem.planner.lines import Line
from llamem.planner.share import Share


def layer_copies(share: Share) -> list[Line]:
    """Copies of layers' weights that stay for a whole step."""
    plan, p, c = share.plan, share.param_bytes, share.compute_bytes
    tpu = share.target.platform == "tpu"
    lines = []
    # A TPU narrows all layers at once, a GPU one by one, unless the backward pass reads the forward pass's copies.
    if p > c and (tpu or share.kept):
        lines.append(Line("layer weights", c * share.stack, "of all layers, in the type of the products"))
    # Moments that are fetched dictate a layout that pads heads of fewer than 128 channels. XLA compresses some of them:
    # counted here as they are without padding.
    if tpu and plan.moments == "host" and share.h < share.lanes:
        numbers = share.L * share.D * (share.H + 2 * share.K) * share.h // share.split
        lines.append(Line("layer weights", p * numbers, "wq, wk and wv in a second layout"))
    if not tpu and plan.attention_tiles == share.K > 1:
        lines.append(Line("layer weights", 2 * p * share.L * share.D * share.K * share.h, "wk and wv, heads first"))
    return lines


def head_copy(share: Share) -> list[Line]:
    """The head in the type of the products, which the loss reads."""
    copied = share.param_bytes > share.compute_bytes
    size = share.compute_bytes * share.head // share.split if copied else 0
    return [Line("layer weights", size, "the head, in the type of the products")]


def zeroed_table(share: Share) -> list[Line]:
    """The embedding's gradient, in the type of the products, where a GPU zeroes it before the backward pass is done."""
    early = share.groups == 1 or share.plan.moments == "device"
    if share.target.platform == "tpu" or share.param_bytes == share.compute_bytes or not early:
        return []
    return [Line("head gradient", share.compute_bytes * share.head // share.split, "the embedding's, zeroed")]


def zeroed_before_the_loss(share: Share, gradients: Line) -> list[Line]:
    """Gradients whose buffers XLA's GPU scheduler zeroes before the loss, where that leaves nothing else waiting."""
    nested, narrow = share.groups > 1, share.param_bytes == share.compute_bytes
    if share.plan.moments == "device":
        return [gradients] if narrow and not nested else []
    return [gradients] if nested else [gradients, *zeroed_table(share)]
