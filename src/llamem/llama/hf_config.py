"""Hugging Face's `config.json` to and from a `LlamaConfig`: Llama, Qwen3."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamem._checks import check_whole, show
from llamem._files import read_json
from llamem.llama.config import LlamaConfig, RopeScaling

_MODEL_TYPES = {"Llama": "llama", "Qwen3": "qwen3"}
_MAX_BYTES = 10_000_000  # real ones have a few thousand
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
# What else changes the computation, and how it must be.
_COMPUTED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}


def config_from_hf(config: Mapping[str, Any] | str | os.PathLike, **changes: Any) -> LlamaConfig:
    """Read a Hugging Face `config.json`: its content, its path, or its folder. Llama and Qwen3.

    `changes` are fields that are to be others. Raises FileNotFoundError, and ValueError, with the file's name, for what
    is no such file or describes what this package does not compute, rather than compute something else.
    """
    if isinstance(config, Mapping):
        return LlamaConfig(**{**_fields(config), **changes})
    path = Path(config).expanduser()
    content = read_config(path)
    try:
        return config_from_hf(content, **changes)
    except ValueError as error:
        raise ValueError(f"{error} (Read from {path}.)") from None


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`, or of a folder's. Raise FileNotFoundError, or ValueError naming it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}: expected a Hugging Face config.json, or a folder that holds one.")
    return read_json(file, _MAX_BYTES)


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
    }


def _fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    family = hf.get("model_type")
    if family not in _MODEL_TYPES.values():
        known = ", ".join(map(repr, _MODEL_TYPES.values()))
        raise ValueError(f"model_type={family!r} in config.json: this package computes {known} models.")
    hf = {name: value for name, value in hf.items() if value is not None}  # null means the default, too
    for name, value in _COMPUTED.items():
        if hf.get(name, value) != value:
            raise ValueError(f"{name}={show(hf[name])} in config.json: only {name}={value!r} is computed here.")
    # transformers 5 moved theta and scaling into one object.
    rope = _mapping(hf, "rope_parameters")
    width, heads = (check_whole(name, hf.get(name)) for name in ("hidden_size", "num_attention_heads"))
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "tie_word_embeddings": False,
    }
    return {
        **_renamed(defaults | hf, _FIELDS),
        "rope_scaling": _rope_scaling(_mapping(hf, "rope_scaling") or rope),
        "qk_norm": family != "llama",
    }


def _renamed(hf: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if missing := [name for name in names if hf.get(name) is None]:
        raise ValueError(f"config.json says no {missing[0]}, which this architecture needs.")
    return {ours: hf[theirs] for theirs, ours in names.items()}


def _rope_scaling(hf: Mapping[str, Any]) -> RopeScaling | None:
    kind = hf.get("rope_type", hf.get("type", None if "factor" in hf else "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} in config.json: only 'llama3' scaling (or 'default') is computed here.")
    return RopeScaling(**_renamed(hf, _OF_SCALING))


def _mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = hf.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={show(value)} in config.json: expected an object.")
    return value
