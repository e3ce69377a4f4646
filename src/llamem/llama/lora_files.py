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
from llamem.llama.lora import IN_LAYERS, Adapters, check_adapters, shape_of
from llamem.llama.model import Llama
from llamem.llama.safetensors_files import Stored, few, tensors_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MODULES = {target: f"self_attn.{target}_proj" for target in ("q", "k", "v", "o")}
_MODULES |= {target: f"mlp.{target}_proj" for target in ("gate", "up", "down")}
_MODULES |= {"embedding": "model.embed_tokens", "head": "lm_head"}
_TARGETS = {module: target for target, module in _MODULES.items()}
_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.layers\.(?P<layer>\d{1,5})\.)?(?P<module>[a-z_.]+?)"
    r"\.(?:lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?|(?P<base>(?:base_layer\.)?weight))"
)
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
    """The adapters of one or several PEFT folders, in order, for this model.

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
    """Writes adapter `i` as a folder that PEFT, vLLM and `load_adapters` read; returns the folder.

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
        paths = [_MODULES[target]]
        if target in IN_LAYERS:
            paths = [f"model.layers.{layer}.{_MODULES[target]}" for layer in range(len(a))]
        else:
            a, b, scale, rank = a[None], b[None], scale[None], rank[None]
        adapted = [path for path, r in zip(paths, rank[:, 0], strict=True) if r]
        targets += [_MODULES[target].split(".")[-1]] if len(adapted) == len(paths) else adapted
        for layer, path in enumerate(paths):
            if r := int(rank[layer, 0]):
                name = "lora_embedding_{}" if target == "embedding" else "lora_{}.weight"
                tensors[f"base_model.model.{path}.{name.format('A')}"] = np.ascontiguousarray(a[layer, 0, :r])
                tensors[f"base_model.model.{path}.{name.format('B')}"] = np.ascontiguousarray(b[layer, 0, :r].T)
                ranks[path] = r
                alphas[path] = float(np.float32(scale[layer, 0] * np.float32(r)))
    config = {
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
    """The commonest value, and by module those that differ from it."""
    values = {path: int(value) if value == int(value) else value for path, value in values.items()}
    common = max(values.values(), key=list(values.values()).count)
    return {field: common, pattern: {path: value for path, value in values.items() if value != common}}


def _load(model: Llama, folder: Path, dtype: Any) -> Adapters:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"There is no {folder / name}: expected a folder written by PEFT, with {WEIGHTS}.")
    peft = read_json(folder / CONFIG, 10_000_000)
    _check_config(peft, folder)
    found: dict[str, dict[int, dict[str, Stored]]] = {}
    unknown = []
    for name, stored in tensors_in(folder / WEIGHTS).items():
        match = _TENSOR.fullmatch(name)
        target = match and _TARGETS.get(match["module"])
        if match is None or target is None or (match["layer"] is not None) != (target in IN_LAYERS):
            unknown.append(name)
        elif match["base"]:
            _check_same(model, target, stored, name, folder)
        else:
            found.setdefault(target, {}).setdefault(int(match["layer"] or 0), {})[match["part"]] = stored
    if unknown or not found:
        raise ValueError(
            f"{folder / WEIGHTS} holds {few(unknown) or 'no tensor'}: expected low-rank matrices of "
            f"{', '.join(_MODULES.values())} alone."
        )
    one = Adapters({}, {}, {}, {})
    for target, by_layer in found.items():
        layers, n_in, n_out = shape_of(model.config, target)
        n_layers = math.prod(layers)
        width = max(_rank(pair, n_in, n_out, f"{target} of layer {i} in {folder}") for i, pair in by_layer.items())
        a, b = np.zeros((n_layers, 1, width, n_in), dtype), np.zeros((n_layers, 1, width, n_out), dtype)
        scale, rank = np.zeros((n_layers, 1), np.float32), np.zeros((n_layers, 1), np.int32)
        for layer, pair in by_layer.items():
            if layer >= n_layers:
                raise ValueError(f"{folder} adapts layer {layer}, and the model has {n_layers}: it has another base.")
            r = pair["A"].shape[0]
            path = f"model.layers.{layer}.{_MODULES[target]}" if target in IN_LAYERS else _MODULES[target]
            a[layer, 0, :r], b[layer, 0, :r] = pair["A"].read(), pair["B"].read().T
            scale[layer, 0], rank[layer, 0] = _scale(peft, path, r, folder), r
        arrays = (a, b, scale, rank) if layers else (a[0], b[0], scale[0], rank[0])
        for part, array in zip((one.a, one.b, one.scale, one.rank), arrays, strict=True):
            part[target] = jnp.asarray(array)
    return one


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


def _check_same(model: Llama, target: str, stored: Stored, name: str, folder: Path) -> None:
    """PEFT repeats a base matrix beside its adapter: it must be the model's."""
    if target not in ("embedding", "head"):
        raise ValueError(f"{name} in {folder}: a whole matrix, not an adapter. It is not read.")
    mine = model.head if target == "head" else model.embedding[...]
    if stored.shape != mine.shape or not np.array_equal(stored.read().astype(mine.dtype), np.asarray(mine)):
        raise ValueError(
            f"{name} in {folder}, of shape {stored.shape}, is not the model's {target}, of shape {mine.shape}: the "
            "adapter was trained over another base, or a resized one. Take the model that it belongs to."
        )


def _rank(pair: Mapping[str, Stored], n_in: int, n_out: int, what: str) -> int:
    shapes = {part: stored.shape for part, stored in sorted(pair.items())}
    r = shapes.get("A", (0,))[0]
    if shapes != {"A": (r, n_in), "B": (n_out, r)} or r < 1:
        raise ValueError(
            f"{what} has matrices of shapes {shapes}; over this model A is [r, {n_in}], and B [{n_out}, r]. The "
            "adapter belongs to another base, or its file is damaged."
        )
    return r


def _scale(peft: Mapping[str, Any], path: str, r: int, folder: Path) -> float:
    """`alpha / r` of one module, after the patterns; ValueError where the folder says another rank."""
    told, alpha = _value(peft, "r", "rank_pattern", path), _value(peft, "lora_alpha", "alpha_pattern", path)
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 0 < alpha < 1e30
    if told != r or not is_number:
        raise ValueError(
            f"{folder / CONFIG} says rank {str(told)[:40]} and alpha {str(alpha)[:40]} for {path}, whose A has {r} "
            "rows: expected that rank, and a finite alpha above 0."
        )
    return alpha / math.sqrt(r) if peft.get("use_rslora") else alpha / r


def _value(peft: Mapping[str, Any], field: str, pattern: str, path: str) -> Any:
    """What PEFT takes: the value of the first pattern that names the end of the module's path, or the field."""
    patterns = peft.get(pattern) or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"{pattern}={str(patterns)[:60]} in an adapter's config: expected an object.")
    for key, value in patterns.items():
        # PEFT takes any regular expression; one from a file could take forever to match, or not be one.
        if not re.fullmatch(r"\^?(\w|\.|\\\.|-)+\$?", key):
            raise ValueError(f"{pattern} names {key[:60]!r}: expected a module's name, such as self_attn.q_proj.")
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return peft.get(field)
