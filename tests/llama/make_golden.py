"""Writes tiny models made by transformers, and what transformers computes with them.

    pip install torch transformers && python tests/llama/make_golden.py

`test_pretrained.py` reads them where neither is installed; where they are, `test_parity.py` calls the same functions on
models made on the spot.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from llamem.course.golden import transformers_llama

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
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # 40 tokens go well past the 16 positions from which on these frequencies are scaled.
    "llama31": ("Llama", COMMON | {"rope_scaling": LLAMA31_ROPE, "rope_theta": 100.0, "tie_word_embeddings": False}),
    "llama32": ("Llama", COMMON | {"num_key_value_heads": 1, "head_dim": 6, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", COMMON | {"num_key_value_heads": 4, "head_dim": 10, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", COMMON | EXPERTS | {"tie_word_embeddings": False}),
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
    found |= {f"grad {name}": gradient for name, gradient in gradients_by_file_name(model).items()}
    return {name: value if isinstance(value, np.ndarray) else value.detach().numpy() for name, value in found.items()}


def gradients_by_file_name(model: Any) -> dict[str, Any]:
    """transformers 5 keeps a layer's experts in two tensors; files hold each expert's three matrices."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                gate, up = both.chunk(2)
                prefix = name.removesuffix("gate_up_proj")
                found |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(parameter.grad):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            found[name] = parameter.grad
    return found


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
