"""Open models in and out: Hugging Face folders of `config.json` and safetensors, read tensor by tensor."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxmem.checks import import_extra
from jaxmem.files import whole_folder
from llamem.files.filling import check_tensors, check_tied, fill
from llamem.files.gguf import open_model
from llamem.files.hf_config import config_from_hf, config_to_hf, read_config
from llamem.files.hub import hub_folder
from llamem.files.safetensors import INDEX, stored_tensors
from llamem.files.tensor_names import Tensor, tensors_of
from llamem.host.memory import host_place, waits_on_host
from llamem.host.weights import wait_on_host
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.mesh.specs import parameter_specs, shardings
from llamem.quantized.blocks import BlockKind, check_kinds, with_blocks
from llamem.quantized.model import is_quantized, plain_params
from llamem.text.tokenizer import GENERATION


def load_pretrained(
    path: str | os.PathLike,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    quantize: BlockKind | None = None,
    plan: Plan = Plan(),
) -> Llama:
    """Load a model of a Hugging Face folder, of the hub's `"owner/name"`, or of a `.gguf` file.

    Folders: Llama and Qwen3; `dtype` is what parameters are stored in (default: what `config.json` says).
    GGUF: Llama and Qwen3; with a `dtype` everything is dequantised to it, without one the blocks of four and eight bits
    stay as they are (`llamem.quantized.blocks`), and norms, embedding and head are of the `compute_dtype`.
    `compute_dtype` is what matrix products read (default: `dtype`, else bfloat16). `quantize`: `"q4_0"`, `"q4_1"` or
    `"q8_0"` puts the layers' matrices into blocks while they are read. `plan` says how it is computed,
    and where parameters lie: on its mesh, on the default device or in the host's memory.

    Every tensor's name, shape and type is checked before anything is allocated; then each is read alone and written
    into the stacked parameters on the device, so that the host holds the destination (where it is the device) and one
    tensor. With `Plan(weights="host")` no matrix is on the device at any time, and the host holds one parameter of all
    layers twice. Raise ValueError for what does not fit together or is no finite number, FileNotFoundError for what is
    not there. Pickles (`pytorch_model.bin`) are never read.

    No shape tells in which order a file has the channels of queries and keys. Expected is transformers': the two that
    RoPE turns together are half a head apart, where Meta's own checkpoints have them side by side. A file in the other
    order under transformers' names loads without an error, and its loss and its answers may look right. What proves
    the order is another program's logits for the same tokens: compare `model(tokens)` with transformers' once.
    """
    if str(path).endswith(".gguf"):
        place = Path(path).expanduser()
        config, stored, kinds = open_model(place, dtype, compute_dtype, quantize)
    else:
        place = hub_folder(path)
        config, stored = _config(place, dtype, compute_dtype), stored_tensors(place)
        kinds = {} if quantize is None else check_kinds(config, quantize)
    check_tied(config, stored, place)
    model = nnx.eval_shape(lambda: with_blocks(Llama(config, rngs=nnx.Rngs(0), plan=plan), kinds))
    graphdef, state = nnx.split(model)
    abstract = nnx.to_pure_dict(state)
    tensors = list(tensors_of(abstract))
    check_tensors(tensors, stored, config, place)
    places = _places(abstract, plan)
    pieces: dict[tuple[str, ...], list[tuple[Tensor, Any]]] = {}
    for tensor in tensors:
        pieces.setdefault(tensor.path, []).append((tensor, stored[tensor.name]))
    for (*above, name), of_parameter in pieces.items():
        params, at = (tree["blocks"] if above else tree for tree in (abstract, places))
        params[name] = fill(params[name], of_parameter, at[name], kinds.get(name))
    nnx.replace_by_pure_dict(state, abstract)
    model = nnx.merge(graphdef, state)
    return wait_on_host(model) if plan.weights == "host" else model


def save_pretrained(model: Llama, folder: str | os.PathLike, *, max_shard_bytes: int = 5_000_000_000) -> Path:
    """Write `config.json` and safetensors that transformers, vLLM and `load_pretrained` read; return the folder.

    Tensors go to the host file by file, each file of at most `max_shard_bytes` (or one tensor). The folder appears
    when all of it is written; raises FileExistsError where it exists and is not empty. The tokens that begin and end a
    text are those of the folder that the model was loaded from. It holds no tokenizer: `Tokenizer(...).save(folder)`
    writes one beside it, and its own tokens into these files.
    """
    safetensors = import_extra("safetensors.numpy", "writing models")
    hub = import_extra("huggingface_hub", "writing models")
    if is_quantized(model):
        raise ValueError(
            "save_pretrained writes numbers, and this model's matrices are in blocks of four or eight bits: pass "
            "llamem.quantized.dequantize(model)."
        )
    params = nnx.to_pure_dict(plain_params(model))
    tensors, itemsize = {tensor.name: tensor for tensor in tensors_of(params)}, model.config.param_dtype.itemsize
    split = hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: math.prod(tensor.shape) * itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    folder = Path(folder)
    with whole_folder(folder) as unfinished:
        (unfinished / "config.json").write_text(json.dumps(config_to_hf(model.config), indent=2))
        if generation := json.loads(model.config.generation_config):
            (unfinished / GENERATION).write_text(json.dumps(generation, indent=2))
        for file, names in split.filename_to_tensors.items():
            arrays = {name: _take(params, tensors[name]) for name in names}
            safetensors.save_file(arrays, unfinished / file, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (unfinished / INDEX).write_text(json.dumps(index, indent=2))
    return folder


def _take(params: Mapping[str, Any], tensor: Tensor) -> np.ndarray:
    leaf: Any = params
    for key in tensor.path:
        leaf = leaf[key]
    array = np.asarray(leaf[tensor.index])
    return np.ascontiguousarray(array.reshape(tensor.shape[::-1]).T if tensor.linear else array)


def _config(folder: Path, dtype: Any, compute_dtype: Any) -> LlamaConfig:
    content = read_config(folder)
    dtype = dtype or content.get("dtype") or content.get("torch_dtype") or "float32"
    return config_from_hf(folder, param_dtype=dtype, compute_dtype=compute_dtype or dtype)


def _places(abstract: Any, plan: Plan) -> Any:
    """Return where each leaf goes: a tree of shardings, or of None for the default device."""
    if plan.mesh.devices > 1:
        return shardings(parameter_specs(abstract, plan.mesh), plan.mesh)
    on_host = plan.weights == "host"
    return jax.tree.map_with_path(lambda path, _: host_place() if on_host and waits_on_host(path) else None, abstract)
