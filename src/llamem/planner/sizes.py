"""What is asked of the planner, and what one device holds of it: every size that an estimate is made of."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from jaxmem.chips.chip import CHIPS, Chip
from jaxmem.common.checks import check_number, show
from jaxmem.compiling import compile_report
from jaxmem.report import Depth, Report
from llamem.adapters.lora import LoraConfig, shape_of
from llamem.adapters.lora_step import check_adapter_plan
from llamem.layers.attention import choose_attention
from llamem.layers.attention_splash import SPLASH_BLOCK
from llamem.layers.remat import Policy, check_policy
from llamem.layers.stack import group_count
from llamem.layers.tile_loops import tile_size
from llamem.llama.checked_inputs import check_heads
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import ACTIVATIONS, MeshShape, Plan
from llamem.losses.tile_choice import resolve_tiles
from llamem.quantized.blocks import BlockKind, check_kinds
from llamem.runs.step_of_plan import abstract_lora_step, abstract_step, check_clip
from llamem.train.optimizers import check_trained_type
from llamem.train.settings import Clip, TrainSettings

_LANES = 128  # a TPU stores the last axis of an array in rows of 128: Google Cloud's TPU architecture page
# JAX's heuristics about "dots" keep every product of matrices; these are the block's, by the names of what follows.
_DOTS = frozenset(("q", "k", "v", "attn_out", "gate", "up", "mlp_out"))
_BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}  # of 32 numbers: see `llamem.quantized.blocks`


@dataclasses.dataclass(frozen=True)
class Question:
    """One AdamW step of a model and a batch on a chip: what every part of the planner reads.

    `seq_len` and `batch_size` are those of the whole batch, over all devices. `mesh`: how several chips share the work;
    None lets a search try ways. `clip`: see `llamem.TrainSettings`. `host_bytes`: what the chip's host can hold of a
    run; None where no plan may put weights there. `lora`: the adapters that are trained over a frozen model, None where
    all of it is trained; `quantize`: the kind of blocks that the frozen matrices are in, such as "q4_0".

    Raises, when it is made, TypeError for what is no config and ValueError for sizes that cannot be.
    """

    config: LlamaConfig
    chip: Chip
    seq_len: int
    batch_size: int = 1
    mesh: MeshShape | None = None
    clip: Clip = "global"
    host_bytes: int | None = None
    lora: LoraConfig | None = None
    quantize: BlockKind | None = None

    def __post_init__(self):
        config, lora, quantize = self.config, self.lora, self.quantize
        if not isinstance(config, LlamaConfig) or not isinstance(lora, LoraConfig | None):
            raise TypeError(
                f"config={show(config)}, lora={show(lora)}: expected a llamem.LlamaConfig, such as "
                "llamem.LlamaConfig.from_name('llama3.2-1b'), and a llamem.LoraConfig(ranks=(16,)), or None."
            )
        if lora is None:
            check_trained_type("param_dtype", config.param_dtype)
        if self.settings.seq_len > config.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len:,} is beyond this model's max_seq_len={config.max_seq_len:,}: shorten the "
                "sequence, or config.replace(max_seq_len=..., rope_scaling=...)."
            )
        if self.host_bytes is not None:
            check_number("host_bytes", self.host_bytes, at_least=0)
        check_clip(self.clip, self.chip.devices, self.chip.name)
        if quantize is not None:
            check_kinds(config, quantize)
        if quantize is not None and lora is None:
            raise ValueError(
                f"quantize={quantize!r} without lora: weights in blocks have no gradient. Say which adapters are "
                "trained over them, lora=llamem.LoraConfig(ranks=(16,)), or leave quantize out."
            )

    @property
    def settings(self) -> TrainSettings:
        """The settings of the step."""
        return TrainSettings(batch_size=self.batch_size, seq_len=self.seq_len, clip=self.clip)

    def stands_in(self, plan: Plan) -> bool:
        """Whether plain JAX's attention is compiled in the place of NVIDIA's, for a GPU that is not here."""
        return plan.attention == "cudnn" and self.chip.absent

    def compile(self, plan: Plan, depth: Depth = "memory") -> Report:
        """Return what the chip's compiler says of the step under a plan, its state donated.

        NVIDIA's attention is in a library that comes with the GPU: for one that is not here the same step is compiled
        with attention in plain JAX, see `stands_in`.
        """
        if self.stands_in(plan):
            plan = plan.replace(attention="tiled")
        if self.lora is None:
            step, *shapes = abstract_step(self.config, self.settings, plan)
        else:
            step, *shapes = abstract_lora_step(self.config, self.settings, plan, self.lora, quantize=self.quantize)
        return compile_report(step, *shapes, donate_argnums=(0,), chip=self.chip.name, depth=depth)


class Sizes:
    """One device's part, in numbers unless a name says bytes: `N` tokens `B x T`, of heads `H` and `K`, of `F`, of `V`.

    `D`, `L` and `h` (the width of the stream, layers, channels of a head) are whole on every device; `lanes` is `h` as
    it lies in memory, `scores` those that a layer's attention has where it writes them down. `trained`: whether the
    model is, and not `adapters`, whose numbers are f32.

    `layer_weights` and `mlp_weights` are a layer's matrices, `head` this device's rows of the head, each whole along D,
    of which a device stores one part of `split`. `vectors` are the scales of all norms. What is stored: `stack`, all
    layers, and `params`, all weights, of which `matrix_bytes` can wait on the host. `tables` of the vocabulary: one
    where the head is the embedding.

    `saved` are the named activations of a layer that stay on the device, `offloaded` those on the host; `kept` says
    whether everything stays, without rematerialisation. `groups`: of layers, in a nested stack. `loss_rows`,
    `loss_columns`: a tile of logits.

    Raises ValueError for what does not divide, and for a plan that the step would refuse.
    """

    def __init__(self, question: Question, plan: Plan):
        config, chip, mesh = question.config, question.chip, plan.mesh
        if mesh.devices != chip.devices:
            raise ValueError(
                f"the plan's mesh {mesh.axes or '{}'} has {mesh.devices} devices, and {chip.name} has {chip.devices}: "
                f"expected a mesh of {chip.devices}, such as mesh={{'fsdp': {chip.devices}}}."
            )
        if question.quantize and mesh.devices > mesh.data:
            raise ValueError(f"{mesh} would split blocks of {question.quantize}: give it a 'data' axis alone.")
        if question.lora is not None:
            check_adapter_plan(question.settings, plan)
        check_heads(config, plan)
        self.question, self.plan, self.config, self.chip, self.mesh = question, plan, config, chip, mesh
        self.trained, self.tpu = question.lora is None, chip.platform == "tpu"
        self.param_bytes, self.compute_bytes = config.param_dtype.itemsize, config.compute_dtype.itemsize

        self.B = _divided("batch_size", question.batch_size, mesh.data * mesh.fsdp, "data x fsdp")
        pair = 2 if mesh.context > 1 else 1  # each device has a part of the beginning, and one of the end
        self.T = pair * _divided("seq_len", question.seq_len, pair * mesh.context, f"{pair} x context")
        self.N, self.D, self.L, self.h = self.B * self.T, config.d_model, config.n_layers, config.head_dim
        self.H = _divided("n_heads", config.n_heads, mesh.tensor, "tensor")
        self.K = _divided("n_kv_heads", config.n_kv_heads, mesh.tensor, "tensor")
        self.F = _divided("d_ff", config.d_ff, mesh.tensor, "tensor")
        self.V = _divided("vocab_size", config.vocab_size, mesh.tensor, "tensor")
        self.attention = _implementation(config, plan, chip, self.T)
        self.scores = self.B * self.H * self.T * self.T * mesh.context
        self.lanes = -(-self.h // _LANES) * _LANES if self.attention == "splash" else self.h

        self.split = mesh.fsdp * mesh.context
        _divided("d_model", self.D, self.split, "fsdp x context")
        self.mlp_weights = 3 * self.D * self.F
        self.layer_weights = 2 * self.D * (self.H + self.K) * self.h + self.mlp_weights
        self.head, self.tables = self.V * self.D, 1 if config.tied_head else 2
        self.vectors = self.L * (2 * self.D + (2 * self.h if config.qk_norm else 0)) + self.D
        self.stack = self.L * self.layer_weights // self.split + self.vectors - self.D
        self.params = self.stack + self.tables * self.head // self.split + self.D
        self.matrix_bytes = self.param_bytes * (self.params - self.vectors)
        if question.quantize:
            in_blocks = self.L * self.layer_weights
            self.matrix_bytes -= self.param_bytes * in_blocks - in_blocks * _BLOCK_BYTES[question.quantize] // 32
        self.adapters = _adapter_numbers(config, question.lora)

        self.saved, self.offloaded, self.kept = _kept_names(plan)
        self.groups = 1
        if plan.mode == "nested" and self.L:
            self.groups = _groups(self.L, self.activation_bytes("block_in"), self.layer_weights * self.param_bytes)
        self.loss_axis, self.loss_rows, self.loss_columns = _loss_tile(question, plan, self.N, self.V)

    def activation_bytes(self, name: str) -> int:
        """Return the bytes of one named activation of one layer, as it lies in memory."""
        if name in ("gate", "up"):
            return self.N * self.F * self.compute_bytes
        width = {"q": self.H, "attn": self.H, "k": self.K, "v": self.K}.get(name, 0) * self.lanes or self.D
        logsumexp = 4 * self.N * self.H if name == "attn" and self.attention != "xla" else 0
        return self.N * width * self.compute_bytes + logsumexp


_groups = functools.lru_cache(maxsize=4096)(group_count)


@functools.lru_cache(maxsize=4096)
def _loss_tiles(described: Chip | None, *question: Any, **facts: Any) -> tuple[str, int]:
    # `described`: a chip that is defined again under its name is another one.
    return resolve_tiles(*question, **facts)


def has_cudnn(config: LlamaConfig, chip: Chip) -> bool:
    """Return whether NVIDIA's own attention computes this model on this chip: see `llamem.layers.causal_attention`."""
    ampere = chip.device_kind.startswith("NVIDIA") and chip.has_bf16  # XLA's "cuda" is AMD's platform, too
    return ampere and config.compute_dtype.itemsize == 2 and config.head_dim <= 128 and config.head_dim % 8 == 0


def usual_types(chip: Chip, lora: LoraConfig | None) -> dict[str, Any]:
    """Return the types of a model on a chip: bfloat16; where it is frozen, the 16 bits that the chip has units for."""
    products = jnp.bfloat16 if lora is None or chip.has_bf16 else jnp.float16
    return {"param_dtype": products, "compute_dtype": products}


def _divided(name: str, size: int, parts: int, over: str) -> int:
    if size < 1 or size % parts:
        raise ValueError(
            f"{name}={size} does not divide among {parts} ({over}): choose a multiple of {parts}, or another mesh."
        )
    return size // parts


def _implementation(config: LlamaConfig, plan: Plan, chip: Chip, T: int) -> str:
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
    policy, none = check_policy(plan.policy), frozenset()
    if plan.remat in (None, "everything_saveable"):
        return frozenset(ACTIVATIONS), none, True
    if not isinstance(policy, Policy):
        dots = _DOTS if "dot" in str(plan.remat) else none
        return (none, dots, False) if "offload" in str(plan.remat) else (dots, none, False)
    saved = frozenset(ACTIVATIONS) - frozenset(policy.save_all_but) if policy.save_all_but else frozenset(policy.save)
    return saved, frozenset(policy.offload), False


def _adapter_numbers(config: LlamaConfig, lora: LoraConfig | None) -> int:
    """Return how many numbers all adapters have; they are whole on every device."""
    total = 0
    for target in lora.target_modules if lora else ():
        layers, n_in, n_out = shape_of(config, target)
        total += math.prod(layers) * (n_in + n_out)
    return total * len(lora.ranks) * max(lora.ranks) if lora else 0


def _loss_tile(question: Question, plan: Plan, N: int, V: int) -> tuple[str, int, int]:
    """Return the axis that the loss is cut along, and the rows and columns of a tile of logits."""
    split = plan.mesh.tensor > 1
    if plan.loss_tiles is None and not split:
        return "tokens", N, V
    generation, of_a_slice, _ = question.chip.name.partition(":")
    lora, config = question.lora, question.config
    at_hand = not (of_a_slice or question.chip.absent)
    chip = None if at_hand else f"{generation}-1" if of_a_slice else question.chip.name
    axis, count = _loss_tiles(
        CHIPS.get(chip or ""),
        plan.loss_tiles or 1,
        "vocab" if split else plan.loss_axis,
        (N, config.d_model, V),
        dtype=config.compute_dtype,
        head_trained=lora is None,
        head_parts=2 if lora and "head" in lora.target_modules else 1,
        chip=chip,
    )
    if axis == "vocab":
        return "vocab", N, tile_size(V, count, 128)
    return "tokens", tile_size(N, count), V
