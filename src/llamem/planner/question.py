"""What the planner is asked: one model, one batch, one chip, and what a step may use."""

import dataclasses
import math
from collections.abc import Mapping

from llamem._checks import check_one_of, check_whole, show
from llamem.llama import LlamaConfig, LoraConfig, MeshShape, Plan
from llamem.llama.quantized import BlockKind, check_kinds
from llamem.memory import Chip, Report, compile_report
from llamem.memory.chips import find_chip, known_chip
from llamem.memory.report import Depth
from llamem.train import TrainSettings, abstract_lora_step, abstract_step
from llamem.train.adapter_step import check_adapter_plan
from llamem.train.settings import Clip


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
        if not isinstance(self.config, LlamaConfig):
            raise TypeError(
                f"config={show(self.config)}: expected a llamem.LlamaConfig, such as "
                "llamem.LlamaConfig.from_name('llama3.2-1b')."
            )
        check_whole("seq_len", self.seq_len)
        check_whole("batch_size", self.batch_size)
        check_one_of("clip", self.clip, ("global", "layer"))
        _check_trained(self.config, self.clip, self.lora, self.quantize)
        host = self.host_bytes
        if host is not None and not (isinstance(host, int | float) and math.isfinite(host) and host >= 0):
            raise ValueError(
                f"host_bytes={show(host)}: expected the bytes that the host can give to a run, at least 0, or None."
            )

    def replace(self, **changes: object) -> "Question":
        """Return a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # pyrefly: ignore[bad-argument-type]

    def check_length(self) -> None:
        """Raise ValueError where the model was not made for so long a sequence."""
        if self.seq_len > self.config.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len:,} is beyond this model's max_seq_len={self.config.max_seq_len:,}: shorten the "
                "sequence, or config.replace(max_seq_len=..., rope_scaling=...)."
            )

    def compile(self, plan: Plan, depth: Depth = "memory") -> Report:
        """Return what the chip's compiler says of the step under a plan, its state donated."""
        settings = TrainSettings(batch_size=self.batch_size, seq_len=self.seq_len, clip=self.clip)
        if self.lora is None:
            step, *shapes = abstract_step(self.config, settings, plan)
        else:
            step, *shapes = abstract_lora_step(self.config, settings, plan, self.lora, quantize=self.quantize)
        return compile_report(step, *shapes, donate_argnums=(0,), chip=self.chip.name, depth=depth)


def _check_trained(config: LlamaConfig, clip: Clip, lora: LoraConfig | None, quantize: BlockKind | None) -> None:
    if not isinstance(lora, LoraConfig | None):
        raise TypeError(f"lora={show(lora)}: expected adapters, such as llamem.LoraConfig(ranks=(16,)), or None.")
    if quantize is not None:
        check_kinds(config, quantize)
    if quantize is not None and lora is None:
        raise ValueError(
            f"quantize={quantize!r} without lora: weights in blocks of four or eight bits have no gradient. Say which "
            "adapters are trained over them, lora=llamem.LoraConfig(ranks=(16,)), or leave quantize out."
        )
    if lora is not None:
        check_adapter_plan(TrainSettings(clip=clip), Plan())


def ask(
    config: LlamaConfig,
    chip: str,
    seq_len: int,
    batch_size: int,
    *,
    compiler: bool,
    mesh: Mapping[str, int] | None = None,
    clip: Clip = "global",
    host_bytes: int | None = None,
    lora: LoraConfig | None = None,
    quantize: BlockKind | None = None,
) -> Question:
    """Return the question about a chip by its name. With `compiler` that chip's compiler must be installed.

    Raises ValueError for an unknown chip, ImportError as `llamem.find_chip` does.
    """
    found = find_chip(chip) if compiler else chip_called(chip)
    shape = None if mesh is None else MeshShape.of(mesh)
    return Question(config, found, seq_len, batch_size, shape, clip, host_bytes, lora, quantize)


def has_cudnn(config: LlamaConfig, chip: Chip) -> bool:
    """Return whether NVIDIA's own attention computes this model on this chip: see `llamem.layers.causal_attention`."""
    ampere = chip.platform == "cuda" and chip.has_bf16
    return ampere and config.compute_dtype.itemsize == 2 and config.head_dim <= 128 and config.head_dim % 8 == 0


def chip_called(name: str) -> Chip:
    """Return a chip of `llamem.CHIPS`, a slice of TPUs such as "v5p:4x4x4", or the one at hand, "local".

    No compiler of an absent one need be installed. Raises ValueError for an unknown name.
    """
    known = known_chip(name) if isinstance(name, str) and name not in ("local", "cpu", "gpu", "tpu") else None
    return known or find_chip(name)
