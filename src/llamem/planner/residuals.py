"""What a forward pass leaves for the backward one."""

from llamem.planner.lines import Line
from llamem.planner.share import Share, activation_bytes

_F32 = 4


def kept_for_backward(share: Share) -> int:
    """Bytes that the forward pass leaves on the device for the backward one."""
    if share.kept:
        return share.L * share.N * _kept_per_token(share) + _kept_of_weights(share)
    # Nothing reads what the feed-forward adds.
    saved = sum(activation_bytes(share, name) for name in share.saved - {"block_in", "mlp_out"})
    inputs = 0 if "block_in" in share.offloaded else activation_bytes(share, "block_in")
    if share.groups > 1:  # the inputs of all groups, and all that one group's layers keep
        return _group_inputs(share) + (share.L // share.groups) * (inputs + saved)
    return share.L * (inputs + saved)


def left_by_forward(share: Share) -> int:
    """The same before the backward pass begins: of groups of layers their inputs alone, the rest is computed again."""
    if share.kept or share.groups == 1:
        return kept_for_backward(share)
    return _group_inputs(share)


def _group_inputs(share: Share) -> int:
    """Bytes of what enters the groups of a nested stack."""
    return 0 if share.offloaded else share.groups * activation_bytes(share, "block_in")


def _kept_per_token(share: Share) -> int:
    """Bytes of one token in one layer where everything stays: what the derivative of each operation reads."""
    c = share.compute_bytes
    inner = 6 * c * share.F  # gate, up, and silu's parts
    in_tiles = (share.plan.mlp_tiles > 1, share.plan.head_groups > 1)  # what is made inside of a tile is not kept
    norms = 1 if in_tiles[0] and share.mesh.tensor == 1 else 2  # the feed-forward's is inside of its tiles
    stream = (3 * _F32 * norms + 2 * c) * share.D  # the norms' f32 factors, and what they read or made
    queries = 3 if share.chip.platform == "tpu" else 2  # Splash reads scaled ones
    heads = c * share.lanes * (queries * share.H + 2 * share.K) + _F32 * share.H
    if share.config.qk_norm:  # the f32 factors of its two norms; a TPU computes one of them again
        factors = 2 if share.chip.platform == "tpu" else 3
        heads += factors * _F32 * share.lanes * (share.H + share.K)
    scores = (_F32 + c) * share.H * share.T if share.attention == "xla" else 0
    return stream + (0 if in_tiles[0] else inner) + (0 if in_tiles[1] else heads + scores)


def turned_over(share: Share) -> list[Line]:
    """The last of the query norm's f32 factors, which a GPU lays out in another order before its backward loop: one at
    a time, each into a new place, for which no tile of logits has left room.
    """
    if not share.kept or not share.config.qk_norm or share.chip.platform == "tpu" or share.plan.head_groups > 1:
        return []
    return [
        Line("residuals", _F32 * share.L * share.N * share.H * share.h, "one f32 factor of the queries' norms, twice")
    ]


def _kept_of_weights(share: Share) -> int:
    """Bytes of attention's weights in groups of heads, which the forward loop writes down for the backward one."""
    return share.compute_bytes * share.L * share.attention_weights if share.plan.head_groups > 1 else 0


def why_residuals(share: Share) -> str:
    """What of the forward pass is kept, in words."""
    if share.kept:
        return f"everything of {share.L} layers"
    kept = sorted(share.saved | ({"block_in"} - share.offloaded))
    layers = f"{share.L} layers" if share.groups == 1 else f"{share.groups} groups and {share.L // share.groups} layers"
    return f"{', '.join(kept) or 'nothing'} of {layers}"


def scores(share: Share) -> int:
    """How many scores a layer's attention has where it writes them down."""
    return share.B * share.H * share.T * share.T * share.mesh.context
