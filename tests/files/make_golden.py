"""Writes tiny models made by transformers, and what transformers computes with them.

    pip install torch transformers && python tests/files/make_golden.py

`test_pretrained.py` reads them where neither is installed; where they are, `test_parity.py` calls the same functions on
models made on the spot.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from llamem_course.golden import transformers_llama

GOLDEN = Path(__file__).parent / "golden"
COMMON = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "attention_bias": False,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # 40 tokens go well past the 16 positions from which on these frequencies are scaled.
    "llama31": ("Llama", COMMON | {"rope_scaling": LLAMA31_ROPE, "rope_theta": 100.0, "tie_word_embeddings": False}),
    "llama32": ("Llama", COMMON | {"num_key_value_heads": 1, "head_dim": 6, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", COMMON | {"num_key_value_heads": 4, "head_dim": 10, "tie_word_embeddings": True}),
}
# The one that is stored in the package, for notebook 06, is smaller: every reader downloads it.
STORED = {"llama31": {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 20}}


def make(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """A model of random weights, far from the usual small ones, so that every term counts; saved as a folder."""
    import torch  # pyrefly: ignore[missing-import]
    import transformers  # pyrefly: ignore[missing-import]

    family, fields = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**fields | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.2
            parameter.copy_((parameter.ndim == 1) + spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def numbers(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits, mean loss, its gradient by every tensor's name, and 12 tokens decoded greedily after the first 8."""
    import torch  # pyrefly: ignore[missing-import]

    ids = torch.from_numpy(tokens)
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    first = ids[:, :8]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = model.generate(first, attention_mask=torch.ones_like(first), **options)  # a 0 is a token like others
    found = {"tokens": tokens, "logits": out.logits, "loss": out.loss, "generated": generated[:, 8:]}
    found |= {f"grad {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {name: value if isinstance(value, np.ndarray) else value.detach().numpy() for name, value in found.items()}


def golden(name: str) -> Path:
    """Where a stored model lies: one of them in the package, for notebook 06."""
    return transformers_llama() if name == "llama31" else GOLDEN / name


def tokens_of(seed: int = 1, vocab_size: int = COMMON["vocab_size"]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (2, 40))


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        folder = golden(name)
        model = make(name, folder, **STORED.get(name, {}))
        found: dict[str, Any] = numbers(model, tokens_of(vocab_size=model.config.vocab_size))
        np.savez_compressed(folder / "numbers.npz", **found)
        (folder / "generation_config.json").unlink(missing_ok=True)
