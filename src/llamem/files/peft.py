"""Adapters in and out: folders of Hugging Face's PEFT, `adapter_config.json` and `adapter_model.safetensors`.

Source: PEFT's `LoraConfig`, `LoraModel` and `utils/save_and_load.py`, versions 0.17 to 0.21.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.common.checks import check_number, check_one_of, check_whole, few, import_extra, show
from jaxmem.common.files import read_json, user_path, whole_folder
from llamem.adapters.adapted_weights import IN_LAYERS
from llamem.adapters.lora import TARGET_MODULES, Adapters, shape_of
from llamem.files.safetensors import Stored, tensors_in
from llamem.llama.model import Llama

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = {target: f"self_attn.{target}_proj" for target in ("q", "k", "v", "o")}
MODULES |= {target: f"mlp.{target}_proj" for target in ("gate", "up", "down")}
MODULES["head"] = "lm_head"
# Fields that say nothing about what is computed, or are read here; which modules are adapted, the tensors tell. Any
# other must be off: it changes the computation.
_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that take something from the weights


def load_adapters(model: Llama, folders: str | os.PathLike | Sequence[str | os.PathLike]) -> Adapters:
    """Load the adapters of one or several PEFT folders, in order, for this model, in f32.

    Ranks and alphas may differ from folder to folder, and some layers or modules may have no adapter. A dropout in the
    folder is for training by PEFT, and not computed here. Raises FileNotFoundError for a file that is missing,
    ValueError, with the folder's name, for an adapter of another base or of another kind (DoRA, trained biases, whole
    modules, ranks or alphas of single modules ..).
    """
    paths = [folders] if isinstance(folders, (str, os.PathLike)) else folders
    return Adapters.join([_load(model, user_path(path)) for path in paths])


def save_adapter(adapters: Adapters, i: int, folder: str | os.PathLike, *, base: str = "") -> Path:
    """Write adapter `i` as a folder that PEFT, vLLM and `load_adapters` read; return the folder.

    `base` is what the folder names as its base model: a hub name or a path. The folder appears when all of it is
    written; raises FileExistsError where it exists and is not empty, ValueError for an adapter that is not there.
    """
    safetensors = import_extra("safetensors.numpy", "writing adapters")
    adapter, folder = adapters.select([i]), user_path(folder)
    tensors: dict[str, np.ndarray] = {}
    targets: list[str] = []
    r, largest = (max(np.max(array) for array in part.values()) for part in (adapter.rank, adapter.scale))
    alpha = float(largest * np.float32(r))
    for target in adapter.a:
        a, b, rank = (np.asarray(part[target]) for part in (adapter.a, adapter.b, adapter.rank))
        if target not in IN_LAYERS:
            a, b, rank = a[None], b[None], rank[None]
        adapted = {layer: _module_path(target, layer) for layer in range(len(a)) if rank[layer, 0]}
        targets += [MODULES[target].split(".")[-1]] if len(adapted) == len(a) else adapted.values()
        for layer in adapted:
            for name, matrix in zip(_tensor_names(target, layer), (a[layer, 0, :r], b[layer, 0, :r].T), strict=True):
                tensors[name] = np.ascontiguousarray(matrix)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": int(r),
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": targets,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "use_rslora": False,
    }
    with whole_folder(folder) as unfinished:
        (unfinished / CONFIG).write_text(json.dumps(config, indent=2))
        safetensors.save_file(tensors, unfinished / WEIGHTS, {"format": "pt"})
    return folder


def _module_path(target: str, layer: int) -> str:
    """Return a module's name in PEFT's patterns and tensors."""
    return f"model.layers.{layer}.{MODULES[target]}" if target in IN_LAYERS else MODULES[target]


def _tensor_names(target: str, layer: int) -> list[str]:
    """Return the names of a module's A and B."""
    return [f"base_model.model.{_module_path(target, layer)}.lora_{part}.weight" for part in "AB"]


def _load(model: Llama, folder: Path) -> Adapters:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"There is no {folder / name}: expected a folder written by PEFT, with {WEIGHTS}.")
    peft = read_json(folder / CONFIG, 10_000_000)
    _check_config(peft, folder)
    stored, adapter = tensors_in(folder / WEIGHTS), Adapters({}, {}, {}, {})
    _check_base(model, stored, folder)
    targets, r = TARGET_MODULES, check_whole(f"r in {folder / CONFIG}", peft.get("r"))
    stabilised = check_one_of(f"use_rslora in {folder / CONFIG}", peft.get("use_rslora") or False, (True, False))
    alpha = check_number(f"lora_alpha in {folder / CONFIG}", peft.get("lora_alpha"), above=0)
    for target in targets:
        layers, n_in, n_out = shape_of(model.config, target)
        a, b = (np.zeros((math.prod(layers), 1, r, size), np.float32) for size in (n_in, n_out))
        scale, rank = np.zeros(a.shape[:2], np.float32), np.zeros(a.shape[:2], np.int32)
        for layer in range(math.prod(layers)):
            if pair := [stored.pop(name).read() for name in _tensor_names(target, layer) if name in stored]:
                _check_pair(pair, r, n_in, n_out, f"{_module_path(target, layer)} in {folder}")
                a[layer, 0], b[layer, 0] = pair[0], pair[1].T
                scale[layer], rank[layer] = alpha / (math.sqrt(r) if stabilised else r), r
        if not rank.any():
            continue
        for part, array in zip((adapter.a, adapter.b, adapter.scale, adapter.rank), (a, b, scale, rank), strict=True):
            part[target] = jnp.asarray(array if layers else array[0])
    if stored or not adapter.a:
        raise ValueError(
            f"{folder / WEIGHTS} holds {few(list(stored)) or 'no tensor'}: expected low-rank matrices of "
            f"{', '.join(MODULES[t] for t in targets)} in {model.config.n_layers} layers alone. The adapter is of "
            f"another kind, or belongs to another base."
        )
    return adapter


def _check_config(peft: Mapping[str, Any], folder: Path) -> None:
    if peft.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={peft.get('peft_type')!r} in {folder / CONFIG}: only LORA is computed here.")
    begun = peft.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"init_lora_weights={begun!r} in {folder / CONFIG}: such an adapter belongs to a base with other weights. "
            "Let PEFT convert it, with save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    for name, value in peft.items():
        if name not in _READ and value not in (None, False, "none", [], {}, "", 0):
            raise ValueError(f"{name}={show(value)} in {folder / CONFIG}: not computed here, only plain LoRA.")


def _check_base(model: Llama, stored: dict[str, Stored], folder: Path) -> None:
    """Take out the head that PEFT repeats beside its adapter. Raise ValueError for another than the model's."""
    for name in (f"base_model.model.lm_head.{inner}weight" for inner in ("", "base_layer.")):
        if name in stored:
            table, head = stored.pop(name).read(), model.head
            if table.shape != head.shape or not np.array_equal(table.astype(head.dtype), np.asarray(head)):
                raise ValueError(
                    f"{name} in {folder}, of shape {table.shape}, is not the model's head, of shape {head.shape}: the "
                    "adapter was trained over another base, or a resized one. Take the model that it belongs to."
                )


def _check_pair(pair: Sequence[np.ndarray], r: int, n_in: int, n_out: int, what: str) -> None:
    shapes = [x.shape for x in pair]
    if shapes != [(r, n_in), (n_out, r)]:
        raise ValueError(
            f"{what} has matrices of shapes {shapes}; over this model and at the folder's r={r} A is [r, {n_in}], and "
            f"B [{n_out}, r]. The adapter belongs to another base, or its file is damaged."
        )
    if not all(np.isfinite(x).all() for x in pair):
        raise ValueError(
            f"the matrices of {what} hold NaN or infinite numbers: the file is damaged, or the training that wrote it "
            "had diverged."
        )
