"""What one device holds of a model and its batch: every size that an estimate is made of, after plan, chip and mesh."""

import dataclasses
import functools
import math
from typing import Any, Literal

from llamem.layers.attention import SPLASH_BLOCK, choose_attention
from llamem.layers.experts import MAX_GROUP
from llamem.layers.remat import Policy, check_policy
from llamem.layers.stack import group_count
from llamem.layers.tiling import tile_size
from llamem.llama import ACTIVATIONS, LlamaConfig, LoraConfig, MeshShape, Plan
from llamem.llama.lora import shape_of
from llamem.llama.model import check_heads
from llamem.losses import choose_tiles
from llamem.memory import Chip
from llamem.planner.question import Question, has_cudnn
from llamem.train import TrainSettings
from llamem.train.adapter_step import check_adapter_plan

_LANES = 128  # a TPU stores the last axis of an array in rows of 128: Google Cloud's TPU architecture page
# JAX's heuristics keep every product of matrices; these are the block's, by the names of what follows them.
_DOTS = ("q", "k", "v", "attn_out", "gate", "up", "mlp_out")
_HEURISTICS = {
    "nothing_saveable": (),
    "dots_saveable": _DOTS,
    "dots_with_no_batch_dims_saveable": _DOTS,
    "offload_dot_with_no_batch_dims": (),
}
_BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}  # of 32 numbers: see `llamem.llama.quantized`


@dataclasses.dataclass(frozen=True)
class Share:
    """One device's part, in numbers unless a name says bytes: `N` tokens `B x T`, of heads `H` and `K`, of `F`, of `V`.

    `D`, `L` and `h` (the width of the stream, layers, channels of a head) are whole on every device.
    `saved` are the named activations of a layer that stay on the device, `offloaded` those on the host; `kept` says
    whether everything stays, without rematerialisation. `groups`: of layers, in a nested stack. `loss_rows`,
    `loss_columns`: a tile of logits.
    """

    question: Question
    config: LlamaConfig
    chip: Chip
    plan: Plan
    mesh: MeshShape
    B: int
    T: int
    N: int
    D: int
    L: int
    H: int
    K: int
    h: int
    F: int
    V: int
    attention: Literal["xla", "tiled", "splash", "cudnn"]
    saved: frozenset[str]
    offloaded: frozenset[str]
    kept: bool
    groups: int
    loss_axis: Literal["tokens", "vocab"]
    loss_rows: int
    loss_columns: int

    @property
    def trained(self) -> bool:
        """Whether the model is trained, and not adapters over it."""
        return self.question.lora is None

    @property
    def adapters(self) -> int:
        """Numbers in all adapters, f32, whole on every device."""
        return 0 if self.question.lora is None else _adapter_numbers(self.config, self.question.lora)

    @property
    def tpu(self) -> bool:
        """Whether it is a TPU."""
        return self.chip.platform == "tpu"

    @property
    def lanes(self) -> int:
        """The head dimension as it lies in memory: a TPU's kernel fills it up to 128."""
        return -(-self.h // _LANES) * _LANES if self.tpu and self.attention == "splash" else self.h

    @property
    def param_bytes(self) -> int:
        """Bytes of a stored number: of a weight, a gradient, a moment."""
        return self.config.param_dtype.itemsize

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that products read."""
        return self.config.compute_dtype.itemsize

    @property
    def split(self) -> int:
        """Into how many parts each weight is cut along D."""
        return self.mesh.fsdp * self.mesh.context

    @property
    def layers_at_work(self) -> int:
        """Layers whose residuals exist together: all of them, or those of one group."""
        return self.L // self.groups if self.groups > 1 else self.L

    @property
    def attention_weights(self) -> int:
        """Numbers in one layer's wq, wk, wv and wo, whole along D."""
        return 2 * self.D * (self.H + self.K) * self.h

    @property
    def mlp_weights(self) -> int:
        """Numbers in one layer's gate, up and down, those of all experts, and their router, whole along D."""
        experts = self.config.n_experts
        return 3 * max(experts, 1) * self.D * self.F + experts * self.D

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
    def matrix_bytes(self) -> int:
        """Bytes of those of them that can wait on the host: all but the norms' scales."""
        p, numbers, kind = self.param_bytes, self.params - self.vectors, self.question.quantize
        if kind is None:
            return p * numbers
        in_blocks = self.L * (self.layer_weights - self.config.n_experts * self.D)  # a router stays as it is
        return p * (numbers - in_blocks) + in_blocks * _BLOCK_BYTES[kind] // 32

    def mlp_rows(self, tokens: int) -> int:
        """Return the rows that a feed-forward multiplies: the tokens, or each of them for k experts, in full groups."""
        experts, choices = self.config.n_experts, tokens * self.config.experts_per_token
        if not experts:
            return tokens
        group = min(MAX_GROUP, 8 * -(-choices // (8 * experts)))  # as `llamem.layers.experts` pads them
        return group * (choices // group + min(experts, choices))

    def activation_bytes(self, name: str) -> int:
        """Return the bytes of one named activation of one layer, as it lies in memory."""
        if name == "router":
            return 4 * self.N * self.config.n_experts
        if name in ("gate", "up"):
            return self.mlp_rows(self.N) * self.F * self.compute_bytes
        width = {"q": self.H, "attn": self.H, "k": self.K, "v": self.K}.get(name, 0) * self.lanes or self.D
        logsumexp = 4 * self.N * self.H if name == "attn" and self.attention != "xla" else 0
        return self.N * width * self.compute_bytes + logsumexp


def share_of(question: Question, plan: Plan) -> Share:
    """Return the sizes for one device. Raises ValueError for what does not divide."""
    config, chip, mesh = question.config, question.chip, plan.mesh
    if mesh.devices != chip.devices:
        raise ValueError(
            f"the plan's mesh {mesh.axes or '{}'} has {mesh.devices} devices, and {chip.name} has {chip.devices}: "
            f"expected a mesh of {chip.devices}, such as mesh={{'fsdp': {chip.devices}}}."
        )
    B = _divided("batch_size", question.batch_size, mesh.data * mesh.fsdp, "data x fsdp")
    if mesh.context > 1:
        _divided("seq_len", question.seq_len, 2 * mesh.context, "2 x context")
    T = question.seq_len // mesh.context
    H = _divided("n_heads", config.n_heads, mesh.tensor, "tensor")
    K = _divided("n_kv_heads", config.n_kv_heads, mesh.tensor, "tensor")
    F = _divided("d_ff", config.moe_d_ff if config.n_experts else config.d_ff, mesh.tensor, "tensor")
    V = _divided("vocab_size", config.vocab_size, mesh.tensor, "tensor")
    check_heads(config, plan)
    if question.lora is not None:
        check_adapter_plan(TrainSettings(), plan)
    if question.quantize and mesh.devices > mesh.data:
        raise ValueError(
            f"the mesh {mesh.axes} would split blocks of {question.quantize}: give it a 'data' axis alone."
        )
    axis, rows, columns = _loss_tile(question, plan, B * T, V)
    saved, offloaded, kept = _kept_names(plan)
    share = Share(
        question=question,
        config=config,
        chip=chip,
        plan=plan,
        mesh=mesh,
        B=B,
        T=T,
        N=B * T,
        D=config.d_model,
        L=config.n_layers,
        H=H,
        K=K,
        h=config.head_dim,
        F=F,
        V=V,
        attention=_implementation(config, plan, chip, T),
        saved=saved,
        offloaded=offloaded,
        kept=kept,
        groups=1,
        loss_axis=axis,
        loss_rows=rows,
        loss_columns=columns,
    )
    if plan.mode != "nested" or not config.n_layers:
        return share
    carry, layer = share.activation_bytes("block_in"), share.layer_weights * share.param_bytes
    return dataclasses.replace(share, groups=_groups(config.n_layers, carry, layer))


_groups = functools.lru_cache(maxsize=4096)(group_count)
_chosen = functools.lru_cache(maxsize=4096)(choose_tiles)


def _divided(name: str, size: int, parts: int, over: str) -> int:
    if size < 1 or size % parts:
        raise ValueError(
            f"{name}={size} does not divide among {parts} ({over}): choose a multiple of {parts}, or another mesh."
        )
    return size // parts


def _implementation(config: LlamaConfig, plan: Plan, chip: Chip, T: int) -> Any:
    """Return how attention is computed. Raises ValueError for a kernel that the chip does not have."""
    block = SPLASH_BLOCK * (2 if plan.mesh.context > 1 else 1)
    chosen = choose_attention(T, tpu=chip.platform == "tpu", block=block)
    if not {"splash": chosen == "splash", "cudnn": has_cudnn(config, chip)}.get(plan.attention, True):
        raise ValueError(
            f"Plan(attention={plan.attention!r}) for {T:,} tokens on {chip.name}: 'splash' is for TPUs and multiples "
            f"of {block} tokens, 'cudnn' for NVIDIA's GPUs from Ampere on, products in 16 bits and heads of up to 128 "
            "channels. Leave attention='auto'."
        )
    return chosen if plan.attention == "auto" else plan.attention


@functools.lru_cache(maxsize=4096)
def _kept_names(plan: Plan) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return which activations stay on the device, which go to the host, and whether simply everything stays."""
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


@functools.lru_cache(maxsize=64)
def _adapter_numbers(config: LlamaConfig, lora: LoraConfig) -> int:
    total = 0
    for target in lora.target_modules:
        layers, n_in, n_out = shape_of(config, target)
        total += math.prod(layers) * (n_in + n_out)
    return total * len(lora.ranks) * max(lora.ranks)


def _loss_tile(question: Question, plan: Plan, N: int, V: int) -> tuple[Any, int, int]:
    """Return the axis that the loss is cut along, and the rows and columns of a tile of logits."""
    split = plan.mesh.tensor > 1
    if plan.loss_tiles is None and not split:
        return "tokens", N, V
    axis: Any = "vocab" if split else plan.loss_axis
    count = plan.loss_tiles or 1
    if count == "auto":
        c, head = question.config, "trained" if question.lora is None else "frozen"
        generation, of_a_slice, _ = question.chip.name.partition(":")
        chip = f"{generation}-1" if of_a_slice else question.chip.name
        choice = _chosen(N, c.d_model, V, dtype=c.compute_dtype, head=head, axis=axis, chip=chip)
        axis, count = choice.axis, choice.num_tiles
    if axis == "vocab":
        return "vocab", N, tile_size(V, int(count), 128)
    return "tokens", tile_size(N, int(count)), V
