"""Hugging Face's `config.json` to and from the fields of a `LlamaConfig`: Llama, Qwen3, Qwen3-MoE."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamem._files import read_json

_MODEL_TYPES = {"Llama": "llama", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}
_MAX_BYTES = 10_000_000  # real ones have a few thousand
_MISSING = object()


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`, or of a folder's. Raise FileNotFoundError, or ValueError naming it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}: expected a Hugging Face config.json, or a folder that holds one.")
    return read_json(file, _MAX_BYTES)


def fields_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's fields, `rope_scaling` as a dict or None. Raise ValueError for what is not computed here."""
    family = hf.get("model_type")
    if family not in _MODEL_TYPES.values():
        known = ", ".join(map(repr, _MODEL_TYPES.values()))
        raise ValueError(f"model_type={family!r} in config.json: this package computes {known} models.")
    experts = family == "qwen3_moe"
    _check_computed(hf, experts)
    rope = _mapping(hf, "rope_parameters")  # transformers 5 moved theta and scaling in here
    heads = _whole(hf, "num_attention_heads")
    width = _whole(hf, "hidden_size")
    theta = rope.get("rope_theta", 10_000.0) if hf.get("rope_theta") is None else hf["rope_theta"]
    return {
        "vocab_size": _whole(hf, "vocab_size"),
        "d_model": width,
        "n_layers": _whole(hf, "num_hidden_layers", at_least=0),
        "n_heads": heads,
        "n_kv_heads": _whole(hf, "num_key_value_heads", heads),
        "head_dim": _whole(hf, "head_dim", max(1, width // heads)),
        "d_ff": _whole(hf, "intermediate_size"),
        "max_seq_len": _whole(hf, "max_position_embeddings"),
        "rope_theta": _number({"rope_theta": theta}, "rope_theta"),
        "rope_scaling": _rope_scaling(_mapping(hf, "rope_scaling") or rope),
        "norm_eps": _number(hf, "rms_norm_eps"),
        "tied_head": _flag(hf, "tie_word_embeddings", False),
        "qk_norm": family != "llama",
        # transformers 5 renamed it.
        "n_experts": _whole(hf, "num_experts" if "num_experts" in hf else "num_local_experts") if experts else 0,
        "experts_per_token": _whole(hf, "num_experts_per_tok") if experts else 0,
        "moe_d_ff": _whole(hf, "moe_intermediate_size") if experts else 0,
    }


def fields_to_hf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.json` for these fields. Raise ValueError for experts without `qk_norm`."""
    if fields["n_experts"] and not fields["qk_norm"]:
        raise ValueError("a mixture of experts is written as Qwen3-MoE, which has qk_norm=True; this config has not.")
    family = ("Qwen3Moe" if fields["n_experts"] else "Qwen3") if fields["qk_norm"] else "Llama"
    scaling = fields["rope_scaling"]
    experts = {
        "num_experts": fields["n_experts"],
        "num_experts_per_tok": fields["experts_per_token"],
        "moe_intermediate_size": fields["moe_d_ff"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": _MODEL_TYPES[family],
        "vocab_size": fields["vocab_size"],
        "hidden_size": fields["d_model"],
        "num_hidden_layers": fields["n_layers"],
        "num_attention_heads": fields["n_heads"],
        "num_key_value_heads": fields["n_kv_heads"],
        "head_dim": fields["head_dim"],
        "intermediate_size": fields["d_ff"],
        "max_position_embeddings": fields["max_seq_len"],
        "rope_theta": fields["rope_theta"],
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_max_seq_len"],
        },
        "rms_norm_eps": fields["norm_eps"],
        "tie_word_embeddings": fields["tied_head"],
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": str(fields["param_dtype"]),
        **(experts if fields["n_experts"] else {}),
    }


def _check_computed(hf: Mapping[str, Any], experts: bool) -> None:
    plain: dict[str, Any] = {
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
    }
    if experts:
        hf = {"norm_topk_prob": False, **hf}  # transformers' own default
        plain |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    for name, value in plain.items():
        if hf.get(name, value) != value:
            raise ValueError(f"{name}={hf[name]!r} in config.json: only {name}={value!r} is computed here.")


def _rope_scaling(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = hf.get("rope_type", hf.get("type", None if "factor" in hf else "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} in config.json: only 'llama3' scaling (or 'default') is computed here.")
    return {
        "factor": _number(hf, "factor"),
        "low_freq_factor": _number(hf, "low_freq_factor"),
        "high_freq_factor": _number(hf, "high_freq_factor"),
        "original_max_seq_len": _whole(hf, "original_max_position_embeddings"),
    }


def _value(hf: Mapping[str, Any], name: str, default: Any) -> Any:
    value = hf.get(name)
    value = default if value is None else value
    if value is _MISSING:
        raise ValueError(f"config.json says no {name}, which this architecture needs.")
    return value


def _whole(hf: Mapping[str, Any], name: str, default: Any = _MISSING, at_least: int = 1) -> int:
    value = _value(hf, name, default)
    if type(value) is not int or not at_least <= value < 2**31:
        raise ValueError(
            f"{name}={_short(value)} in config.json: expected a whole number of at least {at_least}, below 2**31."
        )
    return value


def _number(hf: Mapping[str, Any], name: str) -> float:
    value = _value(hf, name, _MISSING)
    # Compared before it is converted: an int may be too large for a float.
    if type(value) not in (int, float) or not 0 < value < 1e300 or not math.isfinite(value):
        raise ValueError(f"{name}={_short(value)} in config.json: expected a finite number above 0.")
    return float(value)


def _flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    value = _value(hf, name, default)
    if type(value) is not bool:
        raise ValueError(f"{name}={_short(value)} in config.json: expected true or false.")
    return value


def _mapping(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _value(hf, name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={_short(value)} in config.json: expected an object.")
    return value


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"(a number of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
