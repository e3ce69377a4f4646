"""The shape of a Llama: presets by public name, validation."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp

from jaxmem.common.checks import check_number, check_one_of, check_whole, replaced, show


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

    def __post_init__(self):
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_number(name, getattr(self, name), above=0)
        check_whole("original_max_seq_len", self.original_max_seq_len)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The architecture of one model; frozen, so that it can be closed over, compared and hashed.

    Lengths count elements: `d_model` (D), `vocab_size` (V), `n_layers` (L), `n_heads` (H), `n_kv_heads` (K), `d_ff`
    (F). `param_dtype` is what weights are stored in, `compute_dtype` what matrix products read.
    `generation_config`: the text of a folder's `generation_config.json`, which goes with the model, and is not looked
    at where configs are compared.
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
    # Given as anything that names a type, held as a NumPy dtype.
    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    generation_config: str = dataclasses.field(default="{}", compare=False, repr=False)

    def __post_init__(self):
        for name in ("param_dtype", "compute_dtype"):
            self._set(name, _floating(name, getattr(self, name)))
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_seq_len"):
            self._set(name, check_whole(name, getattr(self, name)))
        self._set("n_layers", check_whole("n_layers", self.n_layers, at_least=0))
        for name in ("rope_theta", "norm_eps"):
            self._set(name, check_number(name, getattr(self, name), above=0))
        for name in ("tied_head", "qk_norm"):
            check_one_of(name, getattr(self, name), (True, False))
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling={self.rope_scaling!r}: expected None or a llamem.llama.RopeScaling.")
        if not _is_json_object(self.generation_config):
            raise ValueError(
                f"generation_config={show(self.generation_config)}: expected the text of a generation_config.json."
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}: every key/value head "
                f"serves the same number of query heads. Choose n_kv_heads among the divisors of {self.n_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, but RoPE rotates pairs of channels: choose an even head_dim."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> "LlamaConfig":
        """Return a copy with some fields changed, validated again. Raise TypeError for a field that does not exist."""
        return replaced(self, changes)

    @property
    def architecture(self) -> dict[str, Any]:
        """Its fields by name, without the `generation_config`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "generation_config"}

    @property
    def n_params(self) -> int:
        """The number of trainable parameters, a tied head counted once."""
        d, h, k, hd = self.d_model, self.n_heads, self.n_kv_heads, self.head_dim
        attention = 2 * d * h * hd + 2 * d * k * hd + (2 * hd if self.qk_norm else 0)
        layer = attention + 3 * d * self.d_ff + 2 * d
        return self.n_layers * layer + d + self.vocab_size * d * (1 if self.tied_head else 2)

    def flops_per_token(self, seq_len: int) -> int:
        """Count one token's matrix-product FLOPs, forward; a training step takes three times as many, remat four.

        Causal attention is counted in full (T keys per query), as the usual accelerators' programs compute it.
        """
        embedding = 0 if self.tied_head else self.vocab_size * self.d_model
        norms = self.n_layers * (2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)) + self.d_model
        matrices = self.n_params - embedding - norms
        return 2 * matrices + 4 * self.n_layers * seq_len * self.n_heads * self.head_dim

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> "LlamaConfig":
        """Return a published architecture, such as `"llama3.2-1b"`. Raise ValueError that lists the known names."""
        if name not in PRESETS:
            raise ValueError(
                f"no preset is called {name!r}. Known: {', '.join(PRESETS)}. Of another Llama or Qwen3 take its "
                "config.json: llamem.files.config_from_hf('config.json')."
            )
        return PRESETS[name].replace(**changes)


def _is_json_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def _floating(name: str, dtype: Any) -> Any:
    try:
        known = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise ValueError(f"{name}={dtype!r} is not a floating type: use jnp.bfloat16 or jnp.float32.")
    return known


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
}
