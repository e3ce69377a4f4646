"""GGUF files as models: the config that their fields describe, and their tensors as Hugging Face's files have them.

A wrong permutation or a missing scaling would give fluent nonsense and no error. So whatever this module does not know
is refused: architectures, fields of an architecture (llama.cpp reads nearly all), kinds of scaling.
"""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.common.checks import check_whole, few, import_extra
from llamem.files.tensor_names import IN_LAYER, from_gguf
from llamem.llama.config import LlamaConfig, RopeScaling
from llamem.quantized.blocks import KINDS, BlockKind, Blocks, check_kinds
from llamem.text.gguf_reader import Gguf, open_gguf

_ARCHITECTURES = ("llama", "qwen3")
_PLAIN = ("F32", "F16", "BF16", "F64")
# Our fields by theirs, and what else is read.
_FIELDS = {
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "attention.head_count": "n_heads",
    "feed_forward_length": "d_ff",
    "context_length": "max_seq_len",
}
_EPS, _OPTIONAL = "attention.layer_norm_rms_epsilon", ("vocab_size", "rope.freq_base", "attention.head_count_kv")
_HEAD_DIM = ("attention.key_length", "attention.value_length", "rope.dimension_count")
# "tensor_data_layout" is a converter's note, which llama.cpp does not read.
_READ = {*_FIELDS, _EPS, *_OPTIONAL, *_HEAD_DIM, "rope.scaling.type", "tensor_data_layout"}
_OFF = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0}  # and what they say of a plain model
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
        """Return the numbers, f32. Raise NotImplementedError for a type that `gguf` cannot dequantise."""
        return self._unpermuted(_dequantize(self.tensor).reshape(self.shape))

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
            gguf = import_extra("gguf", "a GGUF file")
            blocks = _split(gguf.quantize(_dequantize(self.tensor), gguf.GGMLQuantizationType[kind.upper()]), kind)
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
    for name, (of_layer, n_inputs, _) in IN_LAYER.items() if dtype is None else ():
        ending = f".{of_layer}.weight"
        types = {tensor.kind for full, tensor in tensors.items() if full.endswith(ending)}
        if n_inputs and (kind := kind_of_stack(types, f"{name} in {file}")):
            kinds[name] = kind
            if others := sorted(types - {kind.upper(), "Q4_0"}):
                changed.append(f"{name} from {' and '.join(others)} into {kind}")
    if changed:
        warnings.warn(
            f"{file}: blocks were changed into kinds that are computed with: {', '.join(changed)}.", stacklevel=3
        )
    return config, tensors, kinds


def config_of(gguf: Gguf) -> LlamaConfig:
    """Return the architecture that the fields describe. Raise ValueError for one that is not computed here."""
    name = gguf.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"{gguf.file} holds a model of the architecture {name!r}: this package computes "
            f"{', '.join(map(repr, _ARCHITECTURES))} from GGUF files."
        )
    if gguf.get("split.count", 1) > 1:
        raise ValueError(f"{gguf.file} is one of several parts: join them with `llama-gguf-split --merge` first.")
    described = {field: field[len(name) + 1 :] for field in gguf.fields if field.startswith(f"{name}.")}
    known = {*_READ, *(theirs for theirs, off in _OFF.items() if gguf.get(f"{name}.{theirs}", off) == off)}
    if other := [field for field, theirs in described.items() if theirs not in known]:
        raise ValueError(
            f"{gguf.file} describes {few(other)}, which this package does not know: it would compute another model. "
            "Take a file of a plain model, or load the Hugging Face folder that it was made from."
        )
    if (scaling := gguf.get(f"{name}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"{gguf.file} has RoPE scaling of the type {scaling!r}: only Llama 3's is computed here.")
    fields = {ours: gguf.get(f"{name}.{theirs}") for theirs, ours in _FIELDS.items()}
    default = check_whole("embedding_length", fields["d_model"]) // check_whole("head_count", fields["n_heads"])
    head_dim = gguf.get(f"{name}.{_HEAD_DIM[0]}", default)
    sizes = {gguf.get(f"{name}.{field}", head_dim) for field in _HEAD_DIM}
    if len(sizes) > 1:
        raise ValueError(
            f"{', '.join(_HEAD_DIM)} in {gguf.file} are {sorted(sizes)}: only equal ones are computed here."
        )
    embedding = gguf.tensors.get("token_embd.weight")
    n_tokens = int(embedding.shape[-1]) if embedding is not None else 0
    try:
        config = LlamaConfig(
            **fields,
            vocab_size=gguf.get(f"{name}.vocab_size", n_tokens),
            n_kv_heads=gguf.get(f"{name}.attention.head_count_kv", fields["n_heads"]),
            head_dim=head_dim,
            rope_theta=_shortest(gguf.get(f"{name}.rope.freq_base", 10_000.0)),
            norm_eps=_shortest(gguf.get(f"{name}.{_EPS}")),
            tied_head="output.weight" not in gguf.tensors,
            qk_norm=name == "qwen3",
            generation_config=json.dumps(_token_ids(gguf)),
        )
    except ValueError as error:
        raise ValueError(f"{error} (Read from {gguf.file}.)") from None
    scaling = _rope_scaling(gguf, config)
    if scaling is not None and f"{name}.rope.freq_base" not in gguf.fields:
        raise ValueError(
            f"{gguf.file} has Llama 3's RoPE scaling and no {name}.rope.freq_base: 10,000 would be taken, and no model "
            "with this scaling was trained with that. Convert the model again."
        )
    return config.replace(rope_scaling=scaling)


def _token_ids(gguf: Gguf) -> dict[str, Any]:
    begin, *ends = (gguf.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos", "eot", "eom"))
    token_ids = {"bos_token_id": begin, "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    return {name: value for name, value in token_ids.items() if value not in (None, [])}


def tensors_of(gguf: Gguf, config: LlamaConfig) -> dict[str, GgufTensor]:
    """Return the file's tensors by Hugging Face's names."""
    by_name = {}
    for name, tensor in gguf.tensors.items():
        heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(name.split(".")[-2] if "." in name else "")
        by_name[from_gguf(name)] = GgufTensor(tensor, heads if heads and not config.qk_norm else 0)
    by_name.pop("rope_freqs.weight", None)  # the config has it
    return by_name


def kind_of_stack(types: set[str], what: str) -> BlockKind | None:
    """Return the blocks that all layers' tensors of one matrix fit into; None where none of them is quantised.

    Raise ValueError for types that no kind here takes.
    """
    if types <= set(_PLAIN):
        return None
    for kind in KINDS:
        if all(kind in _KEPT.get(name, ()) for name in types):
            return kind
    raise ValueError(
        f"{what} is stored as {', '.join(sorted(types))}: of quantised types {', '.join(_KEPT)} are kept as blocks. "
        "Give a dtype, such as load_pretrained(file, dtype='bfloat16'), and every type is dequantised; then, if you "
        "like, quantize(model, 'q4_0')."
    )


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


def _dequantize(tensor: Any) -> np.ndarray:
    quants = import_extra("gguf.quants", "a GGUF file")
    return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)


def _rope_scaling(gguf: Gguf, config: LlamaConfig) -> RopeScaling | None:
    """Return Llama 3.1's scaling, which files hold as each frequency's divisor. Raise ValueError for other divisors."""
    if (tensor := gguf.tensors.get("rope_freqs.weight")) is None:
        return None
    divisors = _dequantize(tensor).reshape(-1)
    if np.all(divisors == 1):
        return None
    scaling, half = RopeScaling(factor=float(round(float(divisors.max()), 3))), config.head_dim // 2
    frequencies = config.rope_theta ** -(np.arange(half) / half)
    turns = scaling.original_max_seq_len * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / (keep + (1 - keep) / scaling.factor)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"rope_freqs.weight in {gguf.file} holds other divisors of RoPE's frequencies than Llama 3.1's scaling "
            f"(from {divisors.min():.4g} to {divisors.max():.4g}): not computed here."
        )
    return scaling


def _shortest(number: float) -> float:
    """Return the decimal number that was meant: files hold float32, in which 1e-5 is 9.99999975e-06."""
    return float(str(np.float32(number)))
