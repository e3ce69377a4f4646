"""What one device holds of a model and its batch: every size an estimate is made of, after plan, chip and mesh."""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np

from llamem.layers.attention import SPLASH_BLOCK
from llamem.layers.remat import Policy, check_policy
from llamem.layers.stack import group_count
from llamem.layers.tiling import tile_size
from llamem.llama import ACTIVATIONS, LlamaConfig, MeshShape, Plan
from llamem.llama.model import check_heads
from llamem.losses import choose_tiles
from llamem.memory import Chip
from llamem.train.settings import Clip

_LANES = 128  # a TPU stores the last axis of an array in rows of 128: Google Cloud's TPU architecture page
# JAX's heuristics keep every product of matrices; these are the block's, by the names of what follows them.
_DOTS = ("q", "k", "v", "attn_out", "gate", "up", "mlp_out")
_HEURISTICS = {
    "nothing_saveable": (),
    "dots_saveable": _DOTS,
    "dots_with_no_batch_dims_saveable": _DOTS,
    "offload_dot_with_no_batch_dims": (),
}


@dataclasses.dataclass(frozen=True)
class Share:
    """One device's part, in numbers unless a name says bytes: `N` tokens `B x T`, of heads `H` and `K`, of `F`, of `V`.

    `split` is into how many parts each weight is cut along D; `param_bytes` and `compute_bytes` are those of a number.
    `saved` are the named activations of a layer that stay on the device, `offloaded` those on the host; `kept` says
    whether everything stays, without rematerialisation. `loss_rows`, `loss_columns`: a tile of logits.
    """

    config: LlamaConfig
    plan: Plan
    chip: Chip
    mesh: MeshShape
    B: int
    T: int
    N: int
    H: int
    K: int
    F: int
    V: int
    split: int
    param_bytes: int
    compute_bytes: int
    attention: Literal["xla", "tiled", "splash", "cudnn"]
    saved: frozenset[str]
    offloaded: frozenset[str]
    kept: bool
    groups: int
    loss_axis: Literal["tokens", "vocab"]
    loss_rows: int
    loss_columns: int
    backward_passes: int = 1

    @property
    def D(self) -> int:
        """The width of the residual stream."""
        return self.config.d_model

    @property
    def L(self) -> int:
        """Layers."""
        return self.config.n_layers

    @property
    def h(self) -> int:
        """Channels of a head."""
        return self.config.head_dim

    @property
    def lanes(self) -> int:
        """The head dimension as it lies in memory: a TPU fills it up to 128."""
        return -(-self.h // _LANES) * _LANES if self.chip.platform == "tpu" else self.h

    @property
    def attention_weights(self) -> int:
        """Numbers in one layer's wq, wk, wv and wo, whole along D."""
        return 2 * self.D * (self.H + self.K) * self.h

    @property
    def mlp_weights(self) -> int:
        """Numbers in one layer's gate, up and down, whole along D."""
        return 3 * self.D * self.F

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices, whole along D."""
        return self.attention_weights + self.mlp_weights

    @property
    def head(self) -> int:
        """Numbers in this device's rows of the head, or of the embedding, whole along D."""
        return self.V * self.D

    @property
    def stack(self) -> int:
        """Numbers that this device stores of all layers' weights; norms are whole on every device."""
        return self.L * self.layer_weights // self.split + self.vectors - self.D

    @property
    def vectors(self) -> int:
        """Numbers in the scales of all norms."""
        return self.L * (2 * self.D + (2 * self.h if self.config.qk_norm else 0)) + self.D

    @property
    def tables(self) -> int:
        """How many `[V, D]` there are: one where the head is the embedding, else two."""
        return 1 if self.config.tied_head else 2

    @property
    def params(self) -> int:
        """Numbers that this device stores of all weights."""
        return self.stack + self.tables * self.head // self.split + self.D

    @property
    def matrices(self) -> int:
        """Those of them that can wait on the host: all but the norms' scales."""
        return self.params - self.vectors


def share_of(
    config: LlamaConfig, plan: Plan, chip: Chip, seq_len: int, batch_size: int, clip: Clip = "global"
) -> Share:
    """The sizes for one device. Raises ValueError for a mixture of experts, and for what does not divide."""
    if config.n_experts:
        raise ValueError(
            f"n_experts={config.n_experts}: estimates know dense feed-forwards only. Ask the compiler for a mixture: "
            "llamem.compile_report(step, state, batch, donate_argnums=(0,), chip=...)."
        )
    mesh = plan.mesh
    if mesh.devices != chip.devices:
        raise ValueError(
            f"the plan's mesh {mesh.axes or '{}'} has {mesh.devices} devices, and {chip.name} has {chip.devices}: "
            f"expected a mesh of {chip.devices}, such as mesh={{'fsdp': {chip.devices}}}."
        )
    _divides("batch_size", batch_size, mesh.data * mesh.fsdp, "data x fsdp")
    _divides("seq_len", seq_len, 2 * mesh.context if mesh.context > 1 else 1, "2 x context")
    for name in ("n_heads", "n_kv_heads", "d_ff", "vocab_size"):
        _divides(name, getattr(config, name), mesh.tensor, "tensor")
    check_heads(config, plan)
    B, T = batch_size // (mesh.data * mesh.fsdp), seq_len // mesh.context
    V = config.vocab_size // mesh.tensor
    axis, rows, columns = _loss_tile(plan, chip, B * T, config.d_model, V, config.compute_dtype, mesh.tensor > 1)
    saved, offloaded, kept = _kept_names(plan)
    weights = 2 * config.d_model * (config.n_heads + config.n_kv_heads) * config.head_dim // mesh.tensor
    weights += 3 * config.d_model * config.d_ff // mesh.tensor
    size, param_size = np.dtype(config.compute_dtype).itemsize, np.dtype(config.param_dtype).itemsize
    nested = plan.mode == "nested" and config.n_layers > 0
    return Share(
        config=config,
        plan=plan,
        chip=chip,
        mesh=mesh,
        B=B,
        T=T,
        N=B * T,
        H=config.n_heads // mesh.tensor,
        K=config.n_kv_heads // mesh.tensor,
        F=config.d_ff // mesh.tensor,
        V=V,
        split=mesh.fsdp * mesh.context,
        param_bytes=param_size,
        compute_bytes=size,
        attention=_implementation(plan, chip, T),
        saved=saved,
        offloaded=offloaded,
        kept=kept,
        groups=group_count(config.n_layers, B * T * config.d_model * size, weights * param_size) if nested else 1,
        loss_axis=axis,
        loss_rows=rows,
        loss_columns=columns,
        backward_passes=2 if plan.update == "in_backward" and clip == "global" else 1,
    )


def activation_bytes(share: Share, name: str) -> int:
    """Bytes of one named activation of one layer, as it lies in memory."""
    per_token = {
        "q": share.H * share.lanes,
        "k": share.K * share.lanes,
        "v": share.K * share.lanes,
        "attn": share.H * share.lanes,
        "gate": share.F,
        "up": share.F,
    }.get(name, share.D)
    logsumexp = 4 * share.N * share.H if name == "attn" and share.attention != "xla" else 0
    return share.N * per_token * share.compute_bytes + logsumexp


def _divides(name: str, size: int, parts: int, over: str) -> None:
    if size < 1 or size % parts:
        raise ValueError(
            f"{name}={size} does not divide among {parts} ({over}): choose a multiple of {parts}, or another mesh."
        )


def _implementation(plan: Plan, chip: Chip, T: int) -> Any:
    if plan.attention != "auto":
        return plan.attention
    if chip.platform == "tpu" and T % SPLASH_BLOCK == 0:
        return "splash"
    return "tiled" if T > 1024 else "xla"


def _kept_names(plan: Plan) -> tuple[frozenset[str], frozenset[str], bool]:
    """Which activations stay on the device, which go to the host, and whether simply everything stays."""
    policy = check_policy(plan.policy)
    offload = frozenset(plan.offload)
    if plan.remat is None or plan.remat == "everything_saveable":
        return frozenset(ACTIVATIONS) - offload, offload, True
    if not isinstance(policy, Policy):
        names = _HEURISTICS[str(plan.remat)]
        away = _DOTS if plan.remat == "offload_dot_with_no_batch_dims" else ()
        return frozenset(names) - offload, offload | frozenset(away), False
    saved = frozenset(ACTIVATIONS) - frozenset(policy.save_all_but) if policy.save_all_but else frozenset(policy.save)
    if policy.also:
        saved |= frozenset(_HEURISTICS.get(policy.also, ACTIVATIONS))
    offload |= frozenset(policy.offload)
    return saved - offload, offload, False


@functools.lru_cache(maxsize=4096)
def _chosen(tokens: int, d_model: int, vocab: int, dtype: Any, axis: Any, chip: str) -> tuple[Any, int]:
    choice = choose_tiles(tokens, d_model, vocab, dtype=dtype, axis=axis, chip=chip)
    return choice.axis, choice.num_tiles


def _loss_tile(plan: Plan, chip: Chip, N: int, D: int, V: int, dtype: Any, split: bool) -> tuple[Any, int, int]:
    """The axis that the loss is cut along, and the rows and columns of a tile of logits."""
    if plan.loss_tiles is None and not split:
        return "tokens", N, V
    axis: Any = "vocab" if split else plan.loss_axis
    count = plan.loss_tiles or 1
    if count == "auto":
        generation, of_a_slice, _ = chip.name.partition(":")
        axis, count = _chosen(N, D, V, dtype, axis, f"{generation}-1" if of_a_slice else chip.name)
    if axis == "vocab":
        return "vocab", N, tile_size(V, int(count), 128)
    return "tokens", tile_size(N, int(count), 16), V
