"""Adapters in and out: folders of Hugging Face's PEFT, `adapter_config.json` and `adapter_model.safetensors`.

Source: PEFT's `LoraConfig`, `LoraModel` and `utils/save_and_load.py`, versions 0.17 to 0.21.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from llamem._extras import import_extra
from llamem._files import read_json, whole_folder
from llamem.llama.lora import IN_LAYERS, Adapters, check_adapters, shape_of, targets_in
from llamem.llama.lora_tensors import MODULES, WEIGHTS, module_path, pairs_in
from llamem.llama.model import Llama
from llamem.llama.safetensors_files import few

CONFIG = "adapter_config.json"
# Fields that say nothing about what is computed, or are read here. Any other must be off: it changes the computation.
_READ = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that take something from the weights


def load_adapters(
    model: Llama, folders: str | os.PathLike | Sequence[str | os.PathLike], *, dtype: Any = jnp.float32
) -> Adapters:
    """Load the adapters of one or several PEFT folders, in order, for this model.

    Ranks and alphas may differ by folder, layer and module. A dropout in the folder is for training by PEFT, and not
    computed here. Raises FileNotFoundError for a file that is missing, ValueError, with the folder's name, for an
    adapter of another base or of another kind (DoRA, trained biases, whole modules ..).
    """
    if not isinstance(model, Llama):
        raise TypeError(f"load_adapters({type(model).__name__}, ...): expected a llamem.Llama, then folders.")
    paths = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
    adapters = Adapters.join([_load(model, Path(path).expanduser(), dtype) for path in paths])
    check_adapters(adapters, jnp.zeros(1, jnp.int32), 1, model.config)
    return adapters


def save_adapter(adapters: Adapters, i: int, folder: str | os.PathLike, *, base: str = "") -> Path:
    """Write adapter `i` as a folder that PEFT, vLLM and `load_adapters` read; return the folder.

    `base` is what the folder names as its base model: a hub name or a path. The folder appears when all of it is
    written; raises FileExistsError where it exists and is not empty, ValueError for an adapter that is not there.
    """
    safetensors = import_extra("safetensors.numpy", "writing adapters")
    if not isinstance(adapters, Adapters) or not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"save_adapter({type(adapters).__name__}, {i!r}, {folder!r}): expected Adapters, a folder.")
    one, folder = adapters.select([i]), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: nothing was written. Choose another folder.")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    targets: list[str] = []
    for target in one.a:
        a, b, scale, rank = (np.asarray(part[target]) for part in (one.a, one.b, one.scale, one.rank))
        if target not in IN_LAYERS:
            a, b, scale, rank = a[None], b[None], scale[None], rank[None]
        paths = [module_path(target, layer) for layer in range(len(a))]
        adapted = [path for layer, path in enumerate(paths) if rank[layer, 0]]
        targets += [MODULES[target].split(".")[-1]] if len(adapted) == len(paths) else adapted
        for layer, path in enumerate(paths):
            if r := int(rank[layer, 0]):
                name = "lora_embedding_{}" if target == "embedding" else "lora_{}.weight"
                tensors[f"base_model.model.{path}.{name.format('A')}"] = np.ascontiguousarray(a[layer, 0, :r])
                tensors[f"base_model.model.{path}.{name.format('B')}"] = np.ascontiguousarray(b[layer, 0, :r].T)
                ranks[path] = r
                alphas[path] = float(np.float32(scale[layer, 0] * np.float32(r)))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": targets,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "use_rslora": False,
        **_with_pattern("r", "rank_pattern", ranks),
        **_with_pattern("lora_alpha", "alpha_pattern", alphas),
    }
    with whole_folder(folder) as unfinished:
        (unfinished / CONFIG).write_text(json.dumps(config, indent=2))
        safetensors.save_file(tensors, unfinished / WEIGHTS, {"format": "pt"})
    return folder


def _with_pattern(field: str, pattern: str, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the commonest value, and by module those that differ from it."""
    values = {path: int(value) if value == int(value) else value for path, value in values.items()}
    common = max(values.values(), key=list(values.values()).count)
    return {field: common, pattern: {path: value for path, value in values.items() if value != common}}


def _load(model: Llama, folder: Path, dtype: Any) -> Adapters:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"There is no {folder / name}: expected a folder written by PEFT, with {WEIGHTS}.")
    peft = read_json(folder / CONFIG, 10_000_000)
    _check_config(peft, folder)
    found = pairs_in(model, folder)
    one = Adapters({}, {}, {}, {})
    for target in dict.fromkeys(target for target, _ in found):
        mine = {layer: pair for (t, layer), pair in found.items() if t == target}
        arrays = _stacked(model, target, mine, folder, peft, dtype)
        if not np.isfinite(arrays[0]).all() or not np.isfinite(arrays[1]).all():
            raise ValueError(
                f"the matrices of {MODULES[target]} in {folder / WEIGHTS} hold NaN or infinite numbers: the file is "
                "damaged, or the training that wrote it had diverged."
            )
        for part, array in zip((one.a, one.b, one.scale, one.rank), arrays, strict=True):
            part[target] = jnp.asarray(array)
    _check_promised(model, {pair["path"] for pair in found.values()}, peft, folder)
    return one


def _check_promised(model: Llama, held: set[str], peft: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError unless the file holds what the config says is adapted: PEFT leaves out the rest."""
    promised = set()
    for target in targets_in(model.config):
        layers, _, _ = shape_of(model.config, target)
        for layer in range(math.prod(layers)):
            path = module_path(target, layer)
            if _is_promised(peft, path, layer if layers else None):
                promised.add(path)
    if promised != held:
        left_out, lacking = sorted(held - promised), sorted(promised - held)
        told = {"adapters of modules that the config leaves out": left_out, "no adapter of promised modules": lacking}
        raise ValueError(
            f"{folder / WEIGHTS} holds {'; '.join(f'{what}: {few(paths)}' for what, paths in told.items() if paths)}. "
            f"Both come from one training: see target_modules, exclude_modules and layers_to_transform in {CONFIG}."
        )


def _is_promised(peft: Mapping[str, Any], path: str, layer: int | None) -> bool:
    """Return whether PEFT would adapt a module, after `check_target_module_exists`."""
    layers = peft.get("layers_to_transform")
    if layers is not None and layer not in (layers if isinstance(layers, list) else [layers]):
        return False
    told, excluded = peft.get("target_modules"), peft.get("exclude_modules")
    if told == "all-linear":
        return path not in (MODULES["embedding"], MODULES["head"]) and not _names_module(excluded, path)
    return _names_module(told, path) and not _names_module(excluded, path)


def _names_module(names: Any, path: str) -> bool:
    """Return whether a list of modules' ends, or a pattern, names this module."""
    if isinstance(names, str):
        # PEFT takes any regular expression; one from a file could take forever to match, or not be one.
        plain = re.fullmatch(r"(\w|\.|\\\.|\.\*|[|()^$?-]){1,300}", names)
        if not plain or names.count("*") > 3 or names.count("?") > 3:
            raise ValueError(f"an adapter's config names modules as {names[:60]!r}: expected a list of their names.")
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names or [])


def _stacked(
    model: Llama, target: str, pairs: Mapping[int, Any], folder: Path, peft: Mapping[str, Any], dtype: Any
) -> tuple[np.ndarray, ...]:
    """Return `a`, `b`, `scale` and `rank` of one target, from the pairs of its layers."""
    layers, n_in, n_out = shape_of(model.config, target)
    n_layers = math.prod(layers)
    width = max(_rank(pair, n_in, n_out, f"{pair['path']} in {folder}") for pair in pairs.values())
    a, b = (np.zeros((n_layers, width, size), dtype) for size in (n_in, n_out))
    scale, rank = np.zeros((n_layers, 1), np.float32), np.zeros((n_layers, 1), np.int32)
    for layer, pair in sorted(pairs.items()):
        if layer >= n_layers:
            raise ValueError(f"{folder} adapts layer {layer}, and the model has {n_layers}: it has another base.")
        rank[layer, 0] = r = len(pair["A"])
        scale[layer, 0] = _scale(peft, pair["path"], r, folder)
        a[layer, :r], b[layer, :r] = pair["A"], pair["B"].T
    a, b = (x.reshape(*layers, 1, *x.shape[-2:]) for x in (a, b))
    return a, b, scale.reshape(*layers, 1), rank.reshape(*layers, 1)


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
            raise ValueError(f"{name}={str(value)[:60]} in {folder / CONFIG}: not computed here, only plain LoRA.")


def _rank(pair: Mapping[str, Any], n_in: int, n_out: int, what: str) -> int:
    shapes = {part: pair[part].shape for part in ("A", "B") if part in pair}
    r = shapes.get("A", (0,))[0]
    if shapes != {"A": (r, n_in), "B": (n_out, r)} or r < 1:
        raise ValueError(
            f"{what} has matrices of shapes {shapes}; over this model A is [r, {n_in}], and B [{n_out}, r]. The "
            "adapter belongs to another base, or its file is damaged."
        )
    return r


def _scale(peft: Mapping[str, Any], path: str, r: int, folder: Path) -> float:
    """Return `alpha / r` of one module, after the patterns. Raise ValueError where the folder says another rank."""
    told, alpha = _value(peft, "r", "rank_pattern", path), _value(peft, "lora_alpha", "alpha_pattern", path)
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 0 < alpha < 1e30
    if told != r or not is_number:
        raise ValueError(
            f"{folder / CONFIG} says rank {str(told)[:40]} and alpha {str(alpha)[:40]} for {path}, whose A has {r} "
            "rows: expected that rank, and a finite alpha above 0."
        )
    return alpha / math.sqrt(r) if peft.get("use_rslora") else alpha / r


def _value(peft: Mapping[str, Any], field: str, pattern: str, path: str) -> Any:
    """Return what PEFT takes: the value of the first pattern that names the end of the module's path, or the field."""
    patterns = peft.get(pattern) or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"{pattern}={str(patterns)[:60]} in an adapter's config: expected an object.")
    for key, value in patterns.items():
        # PEFT takes any regular expression; one from a file could take forever to match, or not be one.
        if not re.fullmatch(r"\^?(\.\*\\\.)?(\w|\.|\\\.|-)+\$?", key):
            raise ValueError(f"{pattern} names {key[:60]!r}: expected a module's name, such as self_attn.q_proj.")
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return peft.get(field)
