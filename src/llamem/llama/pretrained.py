"""Open models in and out: Hugging Face folders of `config.json` and safetensors, read tensor by tensor."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from llamem._extras import import_extra
from llamem._files import whole_folder
from llamem.llama.config import LlamaConfig
from llamem.llama.hf_config import read_config
from llamem.llama.host_memory import host_place, waits_on_host
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.safetensors_files import INDEX, WEIGHTS, Stored, few, stored_tensors
from llamem.llama.sharding import parameter_specs, shardings

# Of one layer: each parameter's name in the files, and how many of its axes are a linear map's inputs. Files store
# such a map as `[outputs, inputs]`; 0 is for what is no linear map and stored as it is.
_LAYER = {
    "attn_norm": ("input_layernorm", 0),
    "wq": ("self_attn.q_proj", 1),
    "wk": ("self_attn.k_proj", 1),
    "wv": ("self_attn.v_proj", 1),
    "wo": ("self_attn.o_proj", 2),
    "q_norm": ("self_attn.q_norm", 0),
    "k_norm": ("self_attn.k_norm", 0),
    "mlp_norm": ("post_attention_layernorm", 0),
    "w_router": ("mlp.gate", 1),
    "w_gate": ("mlp.{expert}gate_proj", 1),
    "w_up": ("mlp.{expert}up_proj", 1),
    "w_down": ("mlp.{expert}down_proj", 1),
}
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "untied_head": "lm_head"}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of the files, and where in the model's stacked parameters it belongs."""

    name: str
    path: tuple[str, ...]  # of the parameter
    index: tuple[int, ...]  # in it: (), (layer,) or (layer, expert)
    shape: tuple[int, ...]  # in the file
    linear: bool  # stored as [outputs, inputs]


def load_pretrained(
    folder_or_hub_name: str | os.PathLike,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    sharding: Any = None,
    plan: Plan = Plan(),
) -> Llama:
    """A model with the weights of a Hugging Face folder, or of the hub's `"owner/name"`: Llama, Qwen3, Qwen3-MoE.

    `dtype` is what parameters are stored in (default: what `config.json` says), `compute_dtype` what matrix products
    read (default: `dtype`). `plan` says how it is computed. `sharding`: None for where the plan says, on its mesh, on
    the default device or in the host's memory; one `jax.sharding.Sharding` for all parameters, or a dict of them in the
    structure of `nnx.to_pure_dict(nnx.state(model))`.

    Every tensor's name, shape and length is checked before anything is allocated; then each is read alone and written
    into the stacked parameters on the device, so that the host holds the destination (where it is the device) and one
    tensor. With `Plan(weights="host")` no matrix is on the device at any time, and the host holds one parameter of all
    layers twice. Raises ValueError for what does not fit together, FileNotFoundError for what is not there,
    PermissionError for a model whose licence was not accepted. Pickles (`pytorch_model.bin`) are never read.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"load_pretrained(plan={plan!r}): expected llamem.Plan().")
    folder = _folder(folder_or_hub_name)
    config = _config(folder, dtype, compute_dtype)
    stored = stored_tensors(folder)
    _check_size(config, stored, folder)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=plan)))
    abstract = nnx.to_pure_dict(state)
    tensors = list(_tensors(abstract))
    _check_tensors(tensors, stored, config, folder)
    mesh = plan.mesh
    if sharding is None and mesh.devices > 1:
        sharding = shardings(parameter_specs(abstract, mesh), mesh)
    places = {path: _sharding_of(path, sharding) for path, _ in jax.tree.leaves_with_path(abstract)}
    if sharding is None and plan.weights == "host":
        places = {path: host_place() if waits_on_host(path) else None for path in places}
    of_path: dict[tuple[str, ...], list[_Tensor]] = {}
    for tensor in tensors:
        of_path.setdefault(tensor.path, []).append(tensor)

    def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        pieces = [(tensor, stored[tensor.name]) for tensor in of_path.get(tuple(key.key for key in path), [])]
        return _fill(leaf, pieces, places[path])

    nnx.replace_by_pure_dict(state, jax.tree.map_with_path(load, abstract))
    return nnx.merge(graphdef, state)


def save_pretrained(model: Llama, folder: str | os.PathLike, *, max_shard_bytes: int = 5_000_000_000) -> Path:
    """Writes `config.json` and safetensors that transformers, vLLM and `load_pretrained` read; returns the folder.

    Tensors go to the host file by file, each file of at most `max_shard_bytes` (or one tensor). The folder appears
    when all of it is written; raises FileExistsError where it exists and is not empty. It holds no tokenizer: copy
    that of the model you started from.
    """
    safetensors = import_extra("safetensors.numpy", "writing models")
    if not isinstance(model, Llama) or not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"save_pretrained({type(model).__name__}, {folder!r}): expected a llamem.Llama and a folder.")
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r}: expected a whole number of at least 1.")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: nothing was written. Choose another folder.")
    config = json.dumps(model.config.to_hf(), indent=2)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    shards: list[list[_Tensor]] = [[]]
    itemsize = np.dtype(model.config.param_dtype).itemsize
    filled = total = 0
    for tensor in _tensors(params):
        size = math.prod(tensor.shape) * itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled, total = filled + size, total + size
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [WEIGHTS] if len(shards) == 1 else names

    with whole_folder(folder) as unfinished:
        (unfinished / "config.json").write_text(config)
        for name, shard in zip(names, shards, strict=True):
            arrays = {tensor.name: _take(params, tensor) for tensor in shard}
            safetensors.save_file(arrays, unfinished / name, {"format": "pt"})
        if len(shards) > 1:
            weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (unfinished / INDEX).write_text(json.dumps(index, indent=2))
    return folder


def _tensors(params: Mapping[str, Any]) -> Iterator[_Tensor]:
    """What the files hold for these stacked parameters, arrays or shapes."""
    for name, file_name in _OUTSIDE.items():
        if name in params:
            yield _Tensor(f"{file_name}.weight", (name,), (), tuple(params[name].shape), linear=False)
    for name, leaf in params["blocks"].items():
        file_name, n_inputs = _LAYER[name]
        n_experts = leaf.shape[1] if "{expert}" in file_name and leaf.ndim == 4 else 0
        for layer in range(leaf.shape[0]):
            for expert in range(n_experts) if n_experts else [None]:
                index = (layer,) if expert is None else (layer, expert)
                shape = tuple(leaf.shape[len(index) :])
                if n_inputs:
                    shape = (math.prod(shape[n_inputs:]), math.prod(shape[:n_inputs]))
                of_layer = file_name.format(expert="" if expert is None else f"experts.{expert}.")
                full_name = f"model.layers.{layer}.{of_layer}.weight"
                yield _Tensor(full_name, ("blocks", name), index, shape, linear=bool(n_inputs))


def _fill(leaf: jax.ShapeDtypeStruct, pieces: list[tuple[_Tensor, Stored]], sharding: Any) -> jax.Array:
    if sharding is not None and sharding.memory_kind == "pinned_host":
        # Nothing is written in place there: the CPU puts the parameter together, and no device sees it.
        on_cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        return jax.block_until_ready(jax.device_put(_fill(leaf, pieces, on_cpu), sharding))
    array = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    def put(array: jax.Array, piece: jax.Array, index: tuple[Any, ...]) -> jax.Array:
        piece = (piece.T if pieces[0][0].linear else piece).astype(array.dtype)
        piece = piece.reshape((1,) * len(index) + array.shape[len(index) :])
        return jax.lax.dynamic_update_slice(array, piece, (*index, *(0,) * (array.ndim - len(index))))

    # Donated, so that the parameter is written in place.
    put = jax.jit(put, donate_argnums=0, out_shardings=sharding)
    for tensor, stored in pieces:
        array = jax.block_until_ready(put(array, stored.read(), tensor.index))
    return array


def _take(params: Mapping[str, Any], tensor: _Tensor) -> np.ndarray:
    leaf: Any = params
    for key in tensor.path:
        leaf = leaf[key]
    array = np.asarray(leaf[tensor.index])
    return np.ascontiguousarray(array.reshape(tensor.shape[::-1]).T if tensor.linear else array)


def _config(folder: Path, dtype: Any, compute_dtype: Any) -> LlamaConfig:
    content = read_config(folder)
    dtype = dtype or content.get("dtype") or content.get("torch_dtype") or "float32"
    return LlamaConfig.from_hf(folder, param_dtype=dtype, compute_dtype=compute_dtype or dtype)


def _check_size(config: LlamaConfig, stored: Mapping[str, Stored], folder: Path) -> None:
    """Refuses a config.json that no such files can belong to, before anything of its size is built."""
    layers = config.n_layers * max(config.n_experts, 1)
    elements = sum(math.prod(tensor.shape) for tensor in stored.values())
    parameters = config.replace(n_layers=max(config.n_layers, 1)).n_params
    if layers > len(stored) or parameters > 100 * elements:
        raise ValueError(
            f"config.json in {folder} describes n_layers={config.n_layers}, n_experts={config.n_experts} and "
            f"{config.n_params:,} parameters in all; the files hold {len(stored):,} tensors of {elements:,} numbers. "
            "They do not belong together, or files are missing."
        )


def _check_tensors(tensors: list[_Tensor], stored: Mapping[str, Stored], config: LlamaConfig, folder: Path) -> None:
    expected = {tensor.name: tensor.shape for tensor in tensors}
    # Some writers repeat a tied head, and old ones store RoPE's frequencies.
    spare = "lm_head.weight" if config.tied_head else None
    extra = [name for name in stored if name not in expected and name != spare and "rotary_emb" not in name]
    wrong = [f"{n} {stored[n].shape}, not {s}" for n, s in expected.items() if n in stored and stored[n].shape != s]
    problems = {
        "missing": [name for name in expected if name not in stored],
        "not known to this architecture": extra,
        "of another shape": wrong,
    }
    if any(problems.values()):
        told = "; ".join(f"{what}: {few(names)}" for what, names in problems.items() if names)
        raise ValueError(f"the tensors in {folder} are not those that its config.json describes. {told}.")


def _sharding_of(path: tuple[Any, ...], sharding: Any) -> Any:
    keys = [key.key for key in path]
    if isinstance(sharding, Mapping):
        for key in keys:
            if not isinstance(sharding, Mapping) or key not in sharding:
                raise ValueError(
                    f"sharding has no entry for {'/'.join(map(str, keys))}: expected a dict in the structure of "
                    "nnx.to_pure_dict(nnx.state(model)), or one jax.sharding.Sharding for all."
                )
            sharding = sharding[key]
    if not isinstance(sharding, jax.sharding.Sharding | None):
        raise TypeError(f"sharding={sharding!r} of {'/'.join(map(str, keys))}: expected a jax.sharding.Sharding.")
    return sharding


def _folder(folder_or_hub_name: str | os.PathLike) -> Path:
    if not isinstance(folder_or_hub_name, (str, os.PathLike)):
        raise TypeError(f"load_pretrained({folder_or_hub_name!r}): expected a folder, or the hub's 'owner/name'.")
    folder = Path(folder_or_hub_name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} has no config.json: expected a Hugging Face model folder.")
        return folder
    name = str(folder_or_hub_name)
    if name.count("/") != 1 or name[0] in "./~":
        raise FileNotFoundError(f"{name!r} is no folder, and no hub name of the form 'owner/name'.")
    hub = import_extra("huggingface_hub", "models of the hub")
    errors = import_extra("huggingface_hub.errors", "models of the hub")
    try:
        patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise PermissionError(
            f"{name} is gated: accept its licence at https://huggingface.co/{name}, then log in once with "
            "`hf auth login` (a token that may read)."
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(f"{name!r} is no folder here and no model on the hub that you may see.") from None
    except (errors.LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{name!r} is no folder here, and the hub cannot be reached ({type(error).__name__}). Download it where "
            "there is a network, and pass the folder."
        ) from None
