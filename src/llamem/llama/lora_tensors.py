"""The tensors of PEFT folders by name: which of them is which matrix of which adapter.

Experts come in two ways. With transformers 4 every expert's matrix is a module, with a pair named after it: so they are
written here, and PEFT over transformers 5 reads that. There a layer's experts are two arrays, gate with up and down;
what PEFT writes of those (`target_parameters`) is read, one `A` for gate and up, as two pairs with the same `A`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamem.llama.lora import IN_LAYERS, shape_of
from llamem.llama.model import Llama
from llamem.llama.safetensors_files import Stored, few, tensors_in

WEIGHTS = "adapter_model.safetensors"
MODULES = {target: f"self_attn.{target}_proj" for target in ("q", "k", "v", "o")}
MODULES |= {target: f"mlp.{target}_proj" for target in ("gate", "up", "down")}
MODULES |= {"embedding": "model.embed_tokens", "head": "lm_head"}
_TARGETS = {module: target for target, module in MODULES.items()}
_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.layers\.(?P<layer>\d{1,5})\.)?"
    r"(?P<module>[a-z_.]+?(?:\.experts\.(?P<expert>\d{1,5})\.[a-z_]+)?)"
    r"\.(?:lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?|(?P<base>(?:base_layer\.)?weight))"
)


def module_path(target: str, layer: int, expert: int | None = None) -> str:
    """Return a module's name in PEFT's patterns and tensors."""
    module = MODULES[target] if expert is None else MODULES[target].replace("mlp.", f"mlp.experts.{expert}.")
    return f"model.layers.{layer}.{module}" if target in IN_LAYERS else module


def pairs_in(model: Llama, folder: Path, peft: Mapping[str, Any]) -> dict[tuple[str, int, int | None], dict[str, Any]]:
    """Return by target, layer and expert: `A`, `B`, and under "path" what PEFT calls the module."""
    found: dict[tuple[str, int, int | None], dict[str, Any]] = {}
    together: dict[tuple[str, int], dict[str, Stored]] = {}  # all experts' of one array
    arrays, unknown = _expert_arrays(model, peft), []
    for name, stored in tensors_in(folder / WEIGHTS).items():
        match = _TENSOR.fullmatch(name)
        module, expert = (match["module"], match["expert"]) if match else ("", None)
        target = _TARGETS.get(module.replace(f"experts.{expert}.", ""))
        of_expert = target is not None and bool(shape_of(model.config, target)[1])
        if match and match["layer"] and match["part"] and module in arrays:
            together.setdefault((arrays[module], int(match["layer"])), {})[match["part"]] = stored
        elif (
            match is None or target is None or (match["layer"] is not None) != (target in IN_LAYERS)
            or (expert is not None) != of_expert
        ):  # fmt: skip
            unknown.append(name)
        elif match["base"]:
            _check_same(model, target, stored, name, folder)
        else:
            layer, expert = int(match["layer"] or 0), int(expert) if expert else None
            pair = found.setdefault((target, layer, expert), {"path": module_path(target, layer, expert)})
            pair[match["part"]] = stored.read()
    for (array, layer), pair in together.items():
        found |= _taken_apart(model, array, layer, pair, folder)
    if unknown or not found:
        of = f" of each of {model.config.n_experts} experts" if model.config.n_experts else ""
        raise ValueError(
            f"{folder / WEIGHTS} holds {few(unknown) or 'no tensor'}: expected low-rank matrices of "
            f"{', '.join(MODULES.values())}{of} alone. The adapter is of another kind, or belongs to another base."
        )
    return found


def _expert_arrays(model: Llama, peft: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules under which the folder holds adapters of whole arrays of experts, and which array each is.

    PEFT wraps the experts once for each array, the second around the first.
    """
    told = peft.get("target_parameters") or []
    names = [str(name).rpartition(".")[2] for name in told] if isinstance(told, list) else [""]
    if set(names) - {"gate_up_proj", "down_proj"} or (names and not model.config.n_experts):
        raise ValueError(
            f"target_parameters={str(told)[:60]} in an adapter's config: expected experts' gate_up_proj and down_proj, "
            "in a model that has experts."
        )
    arrays = [name for name in ("gate_up_proj", "down_proj") if name in names]
    return dict(zip(("mlp.experts.base_layer", "mlp.experts")[-len(arrays) :], arrays, strict=False))


def _taken_apart(
    model: Llama, array: str, layer: int, pair: Mapping[str, Stored], folder: Path
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return each expert's pair of all experts' adapter of gate and up, or down: `A` `[E r, in]`, `B` `[out, r E]`."""
    E, targets = model.config.n_experts, ("gate", "up") if array == "gate_up_proj" else ("down",)
    _, _, n_in, n_out = shape_of(model.config, targets[0])
    shapes = {part: stored.shape for part, stored in sorted(pair.items())}
    rows, path = shapes.get("A", (0,))[0], f"model.layers.{layer}.mlp.experts.{array}"
    if shapes != {"A": (rows, n_in), "B": (len(targets) * n_out, rows)} or rows % E or not rows:
        raise ValueError(
            f"{path} in {folder} has matrices of shapes {shapes}; over this model A is [{E} r, {n_in}], and B "
            f"[{len(targets) * n_out}, r {E}]. The adapter belongs to another base, or its file is damaged."
        )
    a_ErI, b_OrE = pair["A"].read().reshape(E, -1, n_in), pair["B"].read().reshape(len(targets) * n_out, -1, E)
    return {
        (target, layer, expert): {"path": path, "A": a_ErI[expert], "B": b_OrE[i * n_out :, :, expert][:n_out]}
        for i, target in enumerate(targets)
        for expert in range(E)
    }


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
