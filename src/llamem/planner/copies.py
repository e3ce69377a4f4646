"""What compilers write down beside the weights themselves: copies in another type or layout, gradients zeroed early.

Each line was read off the compilers' timelines (`Report.timeline`), most of them of benchmarks/estimates.py's cases.
"""

from llamem.planner.lines import Line
from llamem.planner.residuals import kept_for_backward
from llamem.planner.share import Share


def layer_copies(share: Share) -> list[Line]:
    """Copies of layers' weights that stay for a whole step."""
    plan, p, c = share.plan, share.param_bytes, share.compute_bytes
    tpu = share.chip.platform == "tpu"
    lines = []
    # A TPU narrows all layers at once, a GPU one by one, unless the backward pass reads the forward pass's copies: of
    # products in tiles it does not.
    if p > c and (tpu or share.kept):
        done_again = 0 if tpu or plan.mlp_tiles == 1 else share.L * share.mlp_weights // share.split
        done_again += 0 if tpu or plan.head_groups == 1 else share.L * share.attention_weights // share.split
        size = c * (share.stack - done_again)
        lines.append(Line("layer weights", size, "of all layers, in the type of the products"))
    if second_layouts(share):
        lines.append(Line("layer weights", second_layouts(share), "wq, wk and wv in a second layout"))
    if not tpu and plan.head_groups == share.K > 1:
        lines.append(Line("layer weights", 2 * p * share.L * share.D * share.K * share.h, "wk and wv, heads first"))
    return lines


def second_layouts(share: Share) -> int:
    """Bytes of wq, wk and wv where a TPU keeps them in a second layout: moments that are fetched dictate one that pads
    heads of fewer than 128 channels. Some of them XLA compresses, where that lowers the peak: not counted.
    """
    if share.chip.platform != "tpu" or share.plan.moments != "host" or share.h == share.lanes:
        return 0
    return share.param_bytes * share.L * share.D * (share.H + 2 * share.K) * share.lanes // share.split


def group_slices(share: Share) -> list[Line]:
    """What one group's layers left, sliced out of all groups' for the loop over its layers, where all of it stays."""
    if not share.kept or share.groups == 1:
        return []
    size = kept_for_backward(share) // share.groups
    return [Line("residuals", size, f"of {share.L // share.groups} layers, sliced out for their loop")]


def head_copy(share: Share) -> list[Line]:
    """The head in the type of the products, which the loss reads."""
    copied = share.param_bytes > share.compute_bytes
    size = share.compute_bytes * share.head // share.split if copied else 0
    return [Line("layer weights", size, "the head, in the type of the products")]


def zeroed_table(share: Share) -> list[Line]:
    """The embedding's gradient, in the type of the products, where a GPU zeroes it before the backward pass is done."""
    early = share.groups == 1 or share.plan.moments == "device"
    if share.chip.platform == "tpu" or share.param_bytes == share.compute_bytes or not early:
        return []
    return [Line("head gradient", share.compute_bytes * share.head // share.split, "the embedding's, zeroed")]


def zeroed_before_the_loss(share: Share, gradients: Line) -> list[Line]:
    """Gradients whose buffers XLA's GPU scheduler zeroes before the loss, where that leaves nothing else waiting."""
    nested, narrow = share.groups > 1, share.param_bytes == share.compute_bytes
    if share.plan.moments == "device":
        return [gradients] if narrow and not nested else []
    return [gradients] if nested else [gradients, *zeroed_table(share)]
