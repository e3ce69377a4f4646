"""What a layer's backward pass holds while it works: on its feed-forward, and on its attention.

Each line was read off the compilers' timelines (`Report.timeline`), most of them of benchmarks/estimates.py's cases.
"""

from llamem.planner.lines import Line
from llamem.planner.residuals import scores
from llamem.planner.share import Share

_F32 = 4


def feed_forward(share: Share) -> list[Line]:
    """The lines of its feed-forward, and of what attention's forward pass, run again, has left for later."""
    c, N, tiles = share.compute_bytes, share.N, share.plan.mlp_tiles
    rows = -(-N // tiles)
    kept = 0 if share.kept or share.plan.head_groups > 1 else _kept_for_attention(share)
    if kept and share.attention == "tiled" and "attn_out" in share.saved:  # its f32 sum, as nothing asks for it yet
        kept += c * N * share.h * share.H
    v5e = share.chip.name.startswith("v5e")
    inner = (3 if v5e else 4) * c * rows * share.F  # other compilers hold silu's result, too
    if tiles > 1 or v5e:
        copies = 2 if tiles == 1 and share.B > 1 else 1  # of several sequences it is laid out anew, before it shrinks
        kept += copies * _logsumexp(share) if kept else 0
    elif share.chip.platform == "tpu" and share.groups == 1 and "attn" in share.saved:  # no logsumexp by then
        kept = _turned_back(share)
    if share.kept and tiles == 1:
        inner = 2 * c * rows * share.F
    if tiles > 1 and share.plan.head_groups > 1 and share.chip.platform != "tpu":
        inner += c * (N + 2 * rows) * share.D  # a GPU has zeroed the sum over heads by now; the tile's input, its norm
    return [
        Line("attention", kept, "what its forward pass, run again, leaves for its backward one"),
        Line("feed-forward", inner + _row_sums(share), f"gate, up and gradients for {rows:,} tokens"),
        Line("stream", _stream(share), "residual stream, its gradient, norms; rope's tables"),
    ]


def attention(share: Share) -> list[Line]:
    """The lines of its attention, of one group of heads where they are in groups."""
    c, N, tiles = share.compute_bytes, share.N, share.plan.head_groups
    heads = c * N * share.lanes
    kept = 0 if share.kept and tiles == 1 and share.attention != "tiled" else _kept_for_attention(share)
    gradients = heads * (2 * share.H + 2 * share.K)
    if share.attention == "xla":  # their gradients, and which of them are seen
        gradients += (_F32 + 1) * scores(share)
    if share.attention == "tiled":  # the output's alone, while the others' f32 sums grow
        gradients = 0 if share.saved >= {"q", "k", "v"} and not share.kept else heads * share.H
    if share.attention == "splash":  # the logsumexp's copies are gone when gradients come
        gradients = max(gradients, _logsumexp(share))
    if share.config.qk_norm and tiles > 1:  # the f32 factors of a group's norms
        gradients += (2 if share.chip.platform == "tpu" else 3) * _F32 * N * share.lanes * (share.H + share.K)
    return [
        Line("attention", (kept + gradients) // tiles, "queries, keys, values, output, their gradients"),
        Line("feed-forward", _row_sums(share), "sums of its weights' gradients, f32"),
        Line("stream", _stream(share) - _done(share), "residual stream, its gradient, norms; rope's tables"),
    ]


def _kept_for_attention(share: Share) -> int:
    """Bytes that attention's forward pass leaves for its backward one, of all heads."""
    c, N = share.compute_bytes, share.N
    if share.attention == "xla":
        return N * share.lanes * c * (share.H + 2 * share.K) + (_F32 + c) * scores(share)
    both = c * N * share.lanes * (2 * share.H + 2 * share.K)  # queries and output, keys and values
    if share.config.qk_norm and "q" not in share.saved:  # queries and keys before their norms
        both += c * N * share.lanes * (share.H + share.K)
    if share.attention == "tiled":  # the sums of its gradients, f32, are zeroed early
        return both + _F32 * N * share.h * (share.H + 2 * share.K)
    return both + _F32 * N * share.H


def _logsumexp(share: Share) -> int:
    """Bytes of what Splash, run again, writes beside its result: of each query's logsumexp, f32, 128 copies."""
    run_again = share.attention == "splash" and "attn" not in share.saved
    return _F32 * 128 * share.N * share.H if run_again else 0


def _turned_back(share: Share) -> int:
    """Bytes of attention where the queries' gradient is turned back by rope, while the feed-forward's products wait.

    That gradient in f32, and its two halves, each padded to 128 channels; the output, the gradients of keys and values.
    """
    c, heads = share.compute_bytes, share.N * share.lanes
    return heads * ((_F32 + 2 * c) * share.H + c * (share.H + 2 * share.K))


def _done(share: Share) -> int:
    """Bytes of the stream that a feed-forward in tiles has let go when a GPU's attention in tiles begins."""
    done = share.attention == "tiled" and share.plan.mlp_tiles > 1 and share.plan.head_groups == 1
    return 2 * share.compute_bytes * share.N * share.D if done else 0


def _row_sums(share: Share) -> int:
    """Bytes of the f32 sums of the feed-forward's gradients over tiles of rows."""
    return _F32 * share.mlp_weights if share.plan.mlp_tiles > 1 else 0


def _stream(share: Share) -> int:
    """Bytes of activations as wide as the residual stream, and of rope's two tables."""
    c, wide = share.compute_bytes, share.N * share.D
    tables = 2 * _F32 * share.T * (share.lanes if share.chip.platform == "tpu" else share.h // 2)
    if share.plan.head_groups > 1:  # the sum over groups of heads of its input's gradient, in f32
        return (_F32 + 4 * c) * wide + tables
    return 5 * c * wide + tables
