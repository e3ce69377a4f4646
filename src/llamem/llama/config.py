"""The shape of a Llama: presets by public name, validation, Hugging Face's `config.json` in and out."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of RoPE beyond the context it was trained on.

    Frequencies whose wavelength exceeds `original_max_seq_len / low_freq_factor` tokens are divided by `factor`, those
    below `original_max_seq_len / high_freq_factor` stay, and a straight line joins the two.
    Source: Meta's llama-models, `apply_scaling`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The architecture of one model; frozen, so that it can be closed over, compared and hashed.

    Lengths count elements: `d_model` (D), `vocab_size` (V), `n_layers` (L), `n_heads` (H), `n_kv_heads` (K), `d_ff`
    (F). `param_dtype` is what weights are stored in, `compute_dtype` what matrix products read. With `n_experts` (E)
    above 0 every feed-forward is a mixture: `experts_per_token` (k) of E experts of inner size `moe_d_ff`, as in
    Qwen3-MoE; `d_ff` is unused then.
    """

    vocab_size: int = 128_256
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 128
    d_ff: int = 14_336
    max_seq_len: int = 8192
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_head: bool = False
    qk_norm: bool = False
    n_experts: int = 0
    experts_per_token: int = 0
    moe_d_ff: int = 0
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        object.__setattr__(self, "param_dtype", jnp.dtype(self.param_dtype))
        object.__setattr__(self, "compute_dtype", jnp.dtype(self.compute_dtype))
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_seq_len"):
            _check_count(name, getattr(self, name), at_least=1)
        _check_count("n_layers", self.n_layers, at_least=0)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}: every key/value head "
                f"serves the "
                f"same number of query heads. Choose n_kv_heads among the divisors of {self.n_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, but RoPE rotates pairs of channels: choose an even head_dim."
            )
        for name in ("n_experts", "experts_per_token", "moe_d_ff"):
            _check_count(name, getattr(self, name), at_least=1 if self.n_experts else 0)
        if self.experts_per_token > self.n_experts or (self.moe_d_ff and not self.n_experts):
            raise ValueError(
                f"n_experts={self.n_experts}, experts_per_token={self.experts_per_token}, moe_d_ff={self.moe_d_ff}: a "
                "mixture needs all three, with experts_per_token at most n_experts; a dense model leaves them 0."
            )
        for name in ("param_dtype", "compute_dtype"):
            if not jnp.issubdtype(getattr(self, name), jnp.floating):
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a floating type: use jnp.bfloat16 or jnp.float32."
                )

    def replace(self, **changes: Any) -> "LlamaConfig":
        """A copy with some fields changed, validated again. Raises TypeError for a field that does not exist."""
        return dataclasses.replace(self, **changes)

    @property
    def n_params(self) -> int:
        """The number of trainable parameters, a tied head counted once."""
        return self._count_params(self.n_experts)

    def _count_params(self, n_experts: int) -> int:
        d, h, k, hd = self.d_model, self.n_heads, self.n_kv_heads, self.head_dim
        attention = 2 * d * h * hd + 2 * d * k * hd + (2 * hd if self.qk_norm else 0)
        experts = self.n_experts * d + n_experts * 3 * d * self.moe_d_ff
        layer = attention + (experts if self.n_experts else 3 * d * self.d_ff) + 2 * d
        return self.n_layers * layer + d + self.vocab_size * d * (1 if self.tied_head else 2)

    def flops_per_token(self, seq_len: int) -> int:
        """Matrix-product FLOPs of one token's forward pass; a training step takes three times as many, remat four.

        Causal attention is counted in full (T keys per query), as the usual accelerators' programs compute it; of a
        mixture the experts that a token meets.
        """
        embedding = 0 if self.tied_head else self.vocab_size * self.d_model
        norms = self.n_layers * (2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)) + self.d_model
        matrices = self._count_params(self.experts_per_token) - embedding - norms
        return 2 * matrices + 4 * self.n_layers * seq_len * self.n_heads * self.head_dim

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> "LlamaConfig":
        """A published architecture by name, such as `"llama3.2-1b"`. Raises ValueError that lists the known names."""
        if name not in PRESETS:
            raise ValueError(f"no preset is called {name!r}. Known: {', '.join(PRESETS)}.")
        return PRESETS[name].replace(**changes)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | pathlib.Path, **changes: Any) -> "LlamaConfig":
        """From a Hugging Face `config.json`: its content, its path, or its folder. Llama, Qwen3 and Qwen3-MoE.

        Raises ValueError where the file describes what this package does not compute, rather than compute something
        else.
        """
        if not isinstance(config, Mapping):
            path = pathlib.Path(config)
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        return cls(**{**_from_hf_fields(config), **changes})

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face `config.json` for this architecture.

        Raises ValueError for experts without `qk_norm`: no family of this package's computes that.
        """
        if self.n_experts and not self.qk_norm:
            raise ValueError(
                "a mixture of experts is written as Qwen3-MoE, which has qk_norm=True; this config has not."
            )
        family = ("Qwen3Moe" if self.n_experts else "Qwen3") if self.qk_norm else "Llama"
        scaling = self.rope_scaling
        experts = {
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.moe_d_ff,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": _MODEL_TYPES[family],
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": self.max_seq_len,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling
            and {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            },
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_head,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": str(self.param_dtype),
            **(experts if self.n_experts else {}),
        }


_MODEL_TYPES = {"Llama": "llama", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}


def _check_count(name: str, value: Any, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {at_least}.")


def _from_hf_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    family = hf.get("model_type")
    if family not in _MODEL_TYPES.values():
        known = ", ".join(map(repr, _MODEL_TYPES.values()))
        raise ValueError(f"model_type={family!r} in config.json: this package computes {known} models.")
    experts = family == "qwen3_moe"
    if experts:
        hf = {"norm_topk_prob": False, **hf}  # transformers' own default
    only_experts = (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("norm_topk_prob", True)) if experts else ()
    for name, plain in (
        *only_experts,
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
    ):
        if hf.get(name, plain) != plain:
            raise ValueError(f"{name}={hf[name]!r} in config.json: only {name}={plain!r} is computed here.")
    rope = hf.get("rope_parameters") or {}  # transformers 5 moved theta and scaling in here
    scaling = hf.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if scaling is not None:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "llama3":
            raise ValueError(f"rope_type={kind!r} in config.json: only 'llama3' scaling (or none) is computed here.")
        scaling = RopeScaling(
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_seq_len=scaling["original_max_position_embeddings"],
        )
    heads = hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "d_model": hf["hidden_size"],
        "n_layers": hf["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "d_ff": hf["intermediate_size"],
        "max_seq_len": hf["max_position_embeddings"],
        "rope_theta": float(hf.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        "rope_scaling": scaling,
        "norm_eps": hf["rms_norm_eps"],
        "tied_head": hf.get("tie_word_embeddings", False),
        "qk_norm": family != "llama",
        # transformers 5 renamed it.
        "n_experts": (hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]) if experts else 0,
        "experts_per_token": hf["num_experts_per_tok"] if experts else 0,
        "moe_d_ff": hf["moe_intermediate_size"] if experts else 0,
    }


_LLAMA3_8B = LlamaConfig()
_LLAMA31_8B = _LLAMA3_8B.replace(max_seq_len=131_072, rope_scaling=RopeScaling(factor=8.0))
_LLAMA32_1B = _LLAMA31_8B.replace(
    d_model=2048, n_layers=16, head_dim=64, d_ff=8192, tied_head=True, rope_scaling=RopeScaling(factor=32.0)
)
_QWEN3_06B = LlamaConfig(
    vocab_size=151_936,
    d_model=1024,
    n_layers=28,
    n_heads=16,
    d_ff=3072,
    max_seq_len=40_960,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    tied_head=True,
    qk_norm=True,
)

PRESETS: dict[str, LlamaConfig] = {
    # A laptop's patience: a small body under the full vocabulary.
    "tiny": LlamaConfig(d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=192, tied_head=True),
    "small": LlamaConfig(d_model=512, n_layers=12, n_heads=8, n_kv_heads=4, head_dim=64, d_ff=1536, tied_head=True),
    "llama3-8b": _LLAMA3_8B,
    "llama3.1-8b": _LLAMA31_8B,
    "llama3.1-70b": _LLAMA31_8B.replace(d_model=8192, n_layers=80, n_heads=64, d_ff=28_672),
    "llama3.2-1b": _LLAMA32_1B,
    "llama3.2-3b": _LLAMA32_1B.replace(d_model=3072, n_layers=28, n_heads=24, head_dim=128),
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-1.7b": _QWEN3_06B.replace(d_model=2048, d_ff=6144),
    "qwen3-4b": _QWEN3_06B.replace(d_model=2560, n_layers=36, n_heads=32, d_ff=9728),
    "qwen3-8b": _QWEN3_06B.replace(d_model=4096, n_layers=36, n_heads=32, d_ff=12_288, tied_head=False),
    "qwen3-14b": _QWEN3_06B.replace(d_model=5120, n_layers=40, n_heads=40, d_ff=17_408, tied_head=False),
    "qwen3-32b": _QWEN3_06B.replace(d_model=5120, n_layers=64, n_heads=64, d_ff=25_600, tied_head=False),
    "qwen3-30b-a3b": _QWEN3_06B.replace(
        d_model=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        d_ff=6144,
        tied_head=False,
        n_experts=128,
        experts_per_token=8,
        moe_d_ff=768,
    ),
}
