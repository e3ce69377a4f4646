"""GGUF files as models: the config that their fields describe, and their tensors as Hugging Face's files have them.

A wrong permutation or a missing scaling would give fluent nonsense and no error. So whatever this module does not know
is refused: architectures, fields of an architecture, kinds of scaling, types of tensors.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from llamem._extras import import_extra
from llamem.llama.config import LlamaConfig, RopeScaling
from llamem.llama.gguf_files import Gguf, open_gguf
from llamem.llama.quantized import BlockKind, Blocks, check_kinds
from llamem.llama.safetensors_files import few
from llamem.llama.tensor_names import IN_LAYER, from_gguf

_ARCHITECTURES = ("llama", "qwen3")
_PLAIN = ("F32", "F16", "BF16", "F64")
_READ = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.scaling.type"),
)
# Which kind of blocks takes tensors of a type: as they lie, or changed where the note says how.
_KEPT: dict[str, tuple[BlockKind, ...]] = {
    "Q4_0": ("q4_0", "q4_1", "q8_0"),
    "Q4_1": ("q4_1", "q8_0"),
    "Q4_K": ("q4_1", "q8_0"),  # a scale and a minimum for each 32 numbers, of 6 bits; here of float16
    "Q8_0": ("q8_0",),
    "Q6_K": ("q8_0",),  # a scale for each 16 numbers; here the larger of two for 32
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file, `[outputs, inputs]` as Hugging Face's files have it."""

    tensor: Any  # a gguf.ReaderTensor
    heads: int  # of a matrix whose rows llama.cpp has permuted; else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; the file lists the axes the other way round."""
        return tuple(int(n) for n in reversed(self.tensor.shape))

    @property
    def kind(self) -> str:
        """The type in the file, such as `"Q4_1"`."""
        return self.tensor.tensor_type.name

    @property
    def is_quantized(self) -> bool:
        """Whether the file has the tensor in blocks."""
        return self.kind not in _PLAIN

    def read(self) -> np.ndarray:
        """Return the numbers, f32."""
        return self._unpermuted(_dequantize(self.tensor.data, self.tensor.tensor_type).reshape(self.shape))

    def blocks(self, kind: BlockKind) -> Blocks:
        """Return the tensor in blocks of this kind, one of those that the type allows."""
        data = np.asarray(self.tensor.data)
        if self.kind == "Q4_K" and kind == "q4_1":
            blocks = _from_q4_k(data)
        elif self.kind == "Q4_0" and kind == "q4_1":
            blocks = _split(data, "q4_0")
            blocks["minimum"] = np.float16(-8) * blocks["scale"]
        elif self.kind.lower() == kind:
            blocks = _split(data, kind)
        else:
            quants = import_extra("gguf.quants", "a GGUF file")
            types = import_extra("gguf", "a GGUF file").GGMLQuantizationType
            blocks = _split(quants.quantize(_dequantize(data, self.tensor.tensor_type), types[kind.upper()]), kind)
        return {name: self._unpermuted(array) for name, array in blocks.items()}

    def _unpermuted(self, rows: np.ndarray) -> np.ndarray:
        """Restore Hugging Face's order of rows: llama.cpp's files have the two of a rotary pair beside each other."""
        if not self.heads:
            return rows
        pairs = rows.reshape(self.heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def open_model(
    file: Path, dtype: Any, compute_dtype: Any, quantize: BlockKind | None
) -> tuple[LlamaConfig, dict[str, GgufTensor], dict[str, BlockKind]]:
    """Return a file's config, its tensors by Hugging Face's names, and which parameters are to be in which blocks.

    Warn where the file's own blocks are changed. Raise ValueError for what is not computed here.
    """
    gguf = open_gguf(file)
    products = compute_dtype or dtype or "bfloat16"
    config = config_of(gguf).replace(param_dtype=dtype or products, compute_dtype=products)
    tensors = tensors_of(gguf, config)
    if quantize is not None:
        if any(tensor.is_quantized for tensor in tensors.values()):
            raise ValueError(
                f"load_pretrained({str(file)!r}, quantize={quantize!r}): the file's weights are quantised already. "
                "Leave quantize out, and they stay as they are; or take a file of 16 bits."
            )
        return config, tensors, check_kinds(config, quantize)
    kinds: dict[str, BlockKind] = {}
    changed: list[str] = []
    for name, (of_layer, n_inputs) in IN_LAYER.items() if dtype is None else ():
        names = [
            f"model.layers.{i}.{of_layer.format(expert='')}.weight" for i in range(min(config.n_layers, len(tensors)))
        ]
        stack = [tensors[full] for full in names if full in tensors]
        if n_inputs and (kind := kind_of_stack(stack, f"{name} in {file}")):
            kinds[name] = kind
            types = sorted({tensor.kind for tensor in stack} - {kind.upper(), "Q4_0"})
            if types:
                change = max(change_of(next(t for t in stack if t.kind == type_), kind) for type_ in types)
                changed.append(f"{name} from {' and '.join(types)} into {kind} ({change:.2g} of its norm)")
    if changed:
        warnings.warn(
            f"{file}: blocks were changed into kinds that are computed with: {', '.join(changed)}.", stacklevel=3
        )
    return config, tensors, kinds


def config_of(gguf: Gguf) -> LlamaConfig:
    """Return the architecture that the fields describe. Raise ValueError for one that is not computed here."""
    name = gguf.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"{gguf.file} holds a model of the architecture {name!r}: this package computes "
            f"{', '.join(map(repr, _ARCHITECTURES))} from GGUF files."
        )
    if gguf.whole("split.count", 1) > 1:
        raise ValueError(f"{gguf.file} is one of several parts: join them with `llama-gguf-split --merge` first.")
    known = {f"{name}.{field}" for field in _READ}
    if other := [field for field in gguf.fields if field.startswith(f"{name}.") and field not in known]:
        raise ValueError(
            f"{gguf.file} describes {few(other)}, which this package does not know: it would compute another model. "
            "Take a file of a plain model, or load the Hugging Face folder that it was made from."
        )
    if (scaling := gguf.text(f"{name}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"{gguf.file} has RoPE scaling of the type {scaling!r}: only Llama 3's is computed here.")
    width, heads = gguf.whole(f"{name}.embedding_length"), gguf.whole(f"{name}.attention.head_count")
    head_dim = gguf.whole(f"{name}.attention.key_length", width // max(heads, 1))
    for field in ("attention.value_length", "rope.dimension_count"):
        if gguf.whole(f"{name}.{field}", head_dim) != head_dim:
            raise ValueError(f"{name}.{field} in {gguf.file} is not {head_dim}, the channels of a head.")
    embedding = gguf.tensors.get("token_embd.weight")
    n_tokens = int(embedding.shape[-1]) if embedding is not None else len(gguf.texts("tokenizer.ggml.tokens"))
    try:
        config = LlamaConfig(
            vocab_size=gguf.whole(f"{name}.vocab_size", n_tokens),
            d_model=width,
            n_layers=gguf.whole(f"{name}.block_count"),
            n_heads=heads,
            n_kv_heads=gguf.whole(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            d_ff=gguf.whole(f"{name}.feed_forward_length"),
            max_seq_len=gguf.whole(f"{name}.context_length"),
            rope_theta=_shortest(gguf.number(f"{name}.rope.freq_base", 10_000.0)),
            norm_eps=_shortest(gguf.number(f"{name}.attention.layer_norm_rms_epsilon")),
            tied_head="output.weight" not in gguf.tensors,
            qk_norm=name == "qwen3",
        )
    except ValueError as error:
        raise ValueError(f"{error} (Read from {gguf.file}.)") from None
    return config.replace(rope_scaling=_rope_scaling(gguf, config))


def tensors_of(gguf: Gguf, config: LlamaConfig) -> dict[str, GgufTensor]:
    """Return the file's tensors by Hugging Face's names. Raise ValueError for a type that `gguf` cannot dequantise."""
    found, unknown = {}, []
    for name, tensor in gguf.tensors.items():
        if name == "rope_freqs.weight":
            continue
        heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(name.split(".")[-2] if "." in name else "")
        found[from_gguf(name)] = GgufTensor(tensor, heads if heads and not config.qk_norm else 0)
        if not _is_known(tensor.tensor_type):
            unknown.append(f"{name} of {tensor.tensor_type.name}")
    if unknown:
        raise ValueError(f"{gguf.file} holds {few(unknown)}: types that are not read here.")
    return found


def kind_of_stack(tensors: list[GgufTensor], what: str) -> BlockKind | None:
    """Return the blocks that all layers' tensors of one matrix fit into; None where none of them is quantised.

    Raise ValueError for types that no kind here takes.
    """
    types = sorted({tensor.kind for tensor in tensors})
    if set(types) <= set(_PLAIN):
        return None
    for kind in ("q4_0", "q4_1", "q8_0"):
        if all(kind in _KEPT.get(name, ()) for name in types):
            return kind
    raise ValueError(
        f"{what} is stored as {', '.join(types)}: of quantised types {', '.join(_KEPT)} are kept as blocks. Give a "
        "dtype, such as load_pretrained(file, dtype='bfloat16'), and every type is dequantised; then, if you like, "
        "quantize(model, 'q4_0')."
    )


def change_of(tensor: GgufTensor, kind: BlockKind) -> float:
    """Return how far blocks of this kind are from the file's numbers, as a share of their norm."""
    if tensor.kind.lower() == kind or (tensor.kind, kind) == ("Q4_0", "q4_1"):
        return 0.0
    blocks = {name: array.astype(np.float32) for name, array in tensor.blocks(kind).items() if name != "values"}
    values = tensor.blocks(kind)["values"]
    if kind != "q8_0":
        values = np.concatenate([values & 15, values >> 4], axis=-1)
    numbers = values * blocks["scale"][..., None] + blocks.get("minimum", np.zeros_like(blocks["scale"]))[..., None]
    own = tensor.read()
    return float(np.linalg.norm(numbers.reshape(own.shape) - own) / max(np.linalg.norm(own), 1e-30))


def _split(data: np.ndarray, kind: BlockKind) -> Blocks:
    """Return the parts of rows of blocks, each of which lies in one piece in the file."""
    n_scales, width = (2 if kind == "q4_1" else 1), (32 if kind == "q8_0" else 16)
    raw = data.view(np.uint8).reshape(len(data), -1, 2 * n_scales + width)
    scales = np.ascontiguousarray(raw[..., : 2 * n_scales]).view(np.float16)
    values = np.ascontiguousarray(raw[..., 2 * n_scales :])
    blocks: Blocks = {"values": values.view(np.int8) if kind == "q8_0" else values, "scale": scales[..., 0]}
    return blocks | {"minimum": scales[..., 1]} if kind == "q4_1" else blocks


def _from_q4_k(data: np.ndarray) -> Blocks:
    """Convert super-blocks of 256 numbers to eight blocks of q4_1: the same four bits, scale and minimum in float16."""
    quants = import_extra("gguf.quants", "a GGUF file")
    raw = data.view(np.uint8).reshape(-1, 144)
    d, d_min = (np.ascontiguousarray(raw[:, i : i + 2]).view(np.float16).astype(np.float32) for i in (0, 2))
    scale, minimum = quants.Q4_K.get_scale_min(np.ascontiguousarray(raw[:, 4:16]))
    pairs = raw[:, 16:].reshape(-1, 4, 1, 32)  # a block's 32 numbers below, the next block's above
    q = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(data), -1, 32)
    return {
        "values": q[..., :16] | (q[..., 16:] << 4),
        "scale": (d * scale).astype(np.float16).reshape(len(data), -1),
        "minimum": (-(d_min * minimum)).astype(np.float16).reshape(len(data), -1),
    }


def _dequantize(data: np.ndarray, kind: Any) -> np.ndarray:
    quants = import_extra("gguf.quants", "a GGUF file")
    return np.asarray(quants.dequantize(data, kind), np.float32)


def _is_known(kind: Any) -> bool:
    gguf = import_extra("gguf", "a GGUF file")
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    try:
        return gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), kind).size == block_size
    except NotImplementedError:
        return False


def _rope_scaling(gguf: Gguf, config: LlamaConfig) -> RopeScaling | None:
    """Return Llama 3.1's scaling, which files hold as each frequency's divisor. Raise ValueError for other divisors."""
    if (tensor := gguf.tensors.get("rope_freqs.weight")) is None:
        return None
    divisors = _dequantize(tensor.data, tensor.tensor_type).reshape(-1)
    if np.all(divisors == 1):
        return None
    if divisors.shape == (config.head_dim // 2,) and np.isfinite(divisors).all() and divisors.max() > 1:
        scaling = RopeScaling(factor=float(round(float(divisors.max()), 3)))
        frequencies = config.rope_theta ** -(np.arange(config.head_dim // 2) / (config.head_dim // 2))
        turns = scaling.original_max_seq_len * frequencies / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(divisors, 1 / (keep + (1 - keep) / scaling.factor), rtol=1e-4):
            return scaling
    raise ValueError(
        f"rope_freqs.weight in {gguf.file} holds other divisors of RoPE's frequencies than Llama 3.1's scaling "
        f"(from {divisors.min():.4g} to {divisors.max():.4g}): not computed here."
    )


def _shortest(number: float) -> float:
    """Return the decimal number that was meant: files hold float32, in which 1e-5 is 9.99999975e-06."""
    return float(str(np.float32(number)))
