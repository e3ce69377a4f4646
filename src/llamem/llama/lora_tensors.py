"""The tensors of PEFT folders by name: which of them is which matrix of which adapter."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from llamem.llama.lora import IN_LAYERS, targets_in
from llamem.llama.model import Llama
from llamem.llama.safetensors_files import Stored, few, tensors_in

WEIGHTS = "adapter_model.safetensors"
MODULES = {target: f"self_attn.{target}_proj" for target in ("q", "k", "v", "o")}
MODULES |= {target: f"mlp.{target}_proj" for target in ("gate", "up", "down")}
MODULES |= {"embedding": "model.embed_tokens", "head": "lm_head"}
_TARGETS = {module: target for target, module in MODULES.items()}
_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.layers\.(?P<layer>\d{1,5})\.)?"
    r"(?P<module>[a-z_.]+?)"
    r"\.(?:lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?|(?P<base>(?:base_layer\.)?weight))"
)


def module_path(target: str, layer: int) -> str:
    """Return a module's name in PEFT's patterns and tensors."""
    return f"model.layers.{layer}.{MODULES[target]}" if target in IN_LAYERS else MODULES[target]


def pairs_in(model: Llama, folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return by target and layer: `A`, `B`, and under "path" what PEFT calls the module."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    targets, unknown = targets_in(model.config), []
    for name, stored in tensors_in(folder / WEIGHTS).items():
        match = _TENSOR.fullmatch(name)
        target = _TARGETS.get(match["module"]) if match else None
        if match is None or target not in targets or (match["layer"] is not None) != (target in IN_LAYERS):
            unknown.append(name)
        elif match["base"]:
            _check_same(model, target, stored, name, folder)
        else:
            layer = int(match["layer"] or 0)
            found.setdefault((target, layer), {"path": module_path(target, layer)})[match["part"]] = stored.read()
    if unknown or not found:
        note = " Adapters of experts are not supported." if model.config.n_experts else ""
        raise ValueError(
            f"{folder / WEIGHTS} holds {few(unknown) or 'no tensor'}: expected low-rank matrices of "
            f"{', '.join(MODULES[t] for t in targets)} alone. The adapter is of another kind, or belongs to another "
            f"base.{note}"
        )
    return found


def _check_same(model: Llama, target: str, stored: Stored, name: str, folder: Path) -> None:
    """Check that a base matrix, which PEFT repeats beside its adapter, is the model's."""
    if target not in ("embedding", "head"):
        raise ValueError(f"{name} in {folder}: a whole matrix, not an adapter. It is not read.")
    mine = model.head if target == "head" else model.embedding[...]
    if stored.shape != mine.shape or not np.array_equal(stored.read().astype(mine.dtype), np.asarray(mine)):
        raise ValueError(
            f"{name} in {folder}, of shape {stored.shape}, is not the model's {target}, of shape {mine.shape}: the "
            "adapter was trained over another base, or a resized one. Take the model that it belongs to."
        )
