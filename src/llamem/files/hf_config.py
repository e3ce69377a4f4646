"""Hugging Face's `config.json` to and from a `LlamaConfig`: Llama, Qwen3."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.common.checks import check_whole, few, show
from jaxmem.common.files import read_json, user_path
from llamem.llama.config import LlamaConfig, RopeScaling
from llamem.text.tokenizer_files import GENERATION, MAX_CONFIG_BYTES

_MODEL_TYPES = {"Llama": "llama", "Qwen3": "qwen3"}
# Our fields by theirs. A `LlamaConfig` checks the values.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_seq_len",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_head",
}
_OF_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
}
# What each kind of RoPE may say beside its kind and its theta.
_OF_ROPE: dict[str, Mapping[str, str]] = {"default": {}, "llama3": _OF_SCALING}
# What else changes the computation, and how it must be.
_COMPUTED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}
# What transformers 5 takes for what a file leaves out. A file of "llama" leaves these two to other fields.
_LEFT_OUT: dict[str, Mapping[str, int]] = {
    "llama": {},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_from_hf(config: Mapping[str, Any] | str | os.PathLike, **changes: Any) -> LlamaConfig:
    """Read a Hugging Face `config.json`: its content, its path, or its folder. Llama and Qwen3.

    Of a folder a `generation_config.json` is read, too. `changes` are fields that are to be others.

    A field means what transformers' class of this `model_type` makes of it. What that class reads and this package does
    not compute (biases, another activation, other kinds of RoPE, sliding windows of Qwen3, `quantization_config`) is
    refused by name. What it reads past changes nothing there, and nothing here: `no_rope_layers`,
    `attn_logit_softcapping` or `sliding_window` of a "llama". Fields of a GGUF file are llama.cpp's, which reads nearly
    all: of those any that is not known here is refused.

    Raises FileNotFoundError, and ValueError, with the file's name, for what is no such file or is refused.
    """
    if isinstance(config, Mapping):
        return LlamaConfig(**{**_fields(config), **changes})
    path = user_path(config)
    content, beside = read_config(path), (path if path.is_dir() else path.parent) / GENERATION
    if beside.is_file():
        generation = _token_ids(content) | read_json(beside, MAX_CONFIG_BYTES)
        changes = {"generation_config": json.dumps(generation)} | changes
    try:
        return config_from_hf(content, **changes)
    except ValueError as error:
        raise ValueError(f"{error} (Read from {path}.)") from None


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`, or of a folder's. Raise FileNotFoundError, or ValueError naming it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}: expected a Hugging Face config.json, or a folder that holds one.")
    return read_json(file, MAX_CONFIG_BYTES)


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the content of a Hugging Face `config.json` for this architecture."""
    family = "Qwen3" if config.qk_norm else "Llama"
    scaling = config.rope_scaling
    content = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()}
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": _MODEL_TYPES[family],
        **content,
        "rope_scaling": scaling
        and {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for theirs, ours in _OF_SCALING.items()}},
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": str(config.param_dtype),
        # Null where they are not known: transformers would take 1 and 2 for what is left out.
        **{name: json.loads(config.generation_config).get(name) for name in _TOKEN_IDS},
    }


def _token_ids(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {name: hf[name] for name in _TOKEN_IDS if hf.get(name) is not None}


def _fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    family = hf.get("model_type", "")
    if family not in _MODEL_TYPES.values():
        known = ", ".join(map(repr, _MODEL_TYPES.values()))
        raise ValueError(
            f"model_type={family!r} in config.json: this package computes {known} models. A training "
            "step of another model, yours or a library's, jaxmem.compile_report compiles for any chip."
        )
    # transformers' own defaults; null means the default, too.
    hf = {name: value for name, value in {**_LEFT_OUT[family], **hf}.items() if value is not None}
    for name, value in _COMPUTED.items():
        if hf.get(name, value) != value:
            raise ValueError(f"{name}={show(hf[name])} in config.json: only {name}={value!r} is computed here.")
    if how := hf.get("quantization_config"):
        raise ValueError(
            f"quantization_config={show(how)} in config.json: weights quantised for PyTorch are not computed here. "
            "Take the model's unquantised original and load_pretrained(..., quantize='q4_0'), or its GGUF file."
        )
    layers: Any = hf.get("layer_types", [])
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise ValueError(f"layer_types={show(layers)} in config.json: only full_attention is computed here.")
    width, heads = (check_whole(name, hf.get(name)) for name in ("hidden_size", "num_attention_heads"))
    theta, scaling = _rope(hf)
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "tie_word_embeddings": False,
    }
    fields = _renamed({**defaults, **hf, "rope_theta": theta}, _FIELDS)
    ids = json.dumps(_token_ids(hf))
    return {**fields, "rope_scaling": scaling, "qk_norm": family != "llama", "generation_config": ids}


def _renamed(hf: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if missing := [name for name in names if hf.get(name) is None]:
        raise ValueError(f"config.json says no {missing[0]}, which this architecture needs.")
    return {ours: hf[theirs] for theirs, ours in names.items()}


def _rope(hf: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
    """Return theta and the scaling, from the top, from `rope_scaling` or, as transformers 5 has it, `rope_parameters`.

    Raise ValueError where two places differ, and for what is not computed here.
    """
    old, new = _mapping(hf, "rope_scaling"), _mapping(hf, "rope_parameters")
    if set(new) == {"full_attention"} and hf["model_type"] != "llama":  # by kind of layer, of which there is one here
        new = _mapping(new, "full_attention")
    if old and new and old != new:
        raise ValueError(f"rope_scaling={show(old)} and rope_parameters={show(new)} in config.json differ: leave one.")
    rope = {name: value for name, value in (old or new).items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", None if "factor" in rope else "default"))
    if not isinstance(kind, str) or kind not in _OF_ROPE or rope.get("type", kind) != kind:
        raise ValueError(
            f"rope_type={show(kind)}, type={show(rope.get('type', kind))} in config.json: only 'llama3' scaling (or "
            "'default') is computed here."
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_OF_ROPE[kind]}
    if other := sorted(set(rope) - known):
        raise ValueError(
            f"{few(other)} in {'rope_scaling' if old else 'rope_parameters'} of config.json: not known to RoPE of the "
            f"kind {kind!r} of a {hf['model_type']!r} model. It may turn by other angles than are computed here."
        )
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in hf and name in rope and hf[name] != rope[name]:
            raise ValueError(
                f"{name} in config.json is {show(hf[name])} at the top and {show(rope[name])} in its RoPE parameters: "
                "leave the right one."
            )
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"partial_rotary_factor={show(part)} in config.json: only 1.0 is computed here.")
    theta = hf.get("rope_theta", rope.get("rope_theta"))
    if kind == "llama3":
        if theta is None:
            raise ValueError(
                "config.json says no rope_theta beside rope_type='llama3': 10,000 would be taken, and no model with "
                "this scaling was trained with that. Write the model's own, 500000.0 for Llama 3."
            )
        return theta, RopeScaling(**_renamed(rope, _OF_SCALING))
    return 10_000.0 if theta is None else theta, None


def _mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = hf.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={show(value)} in config.json: expected an object.")
    return value
