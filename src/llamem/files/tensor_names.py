"""Which tensor of a model's files belongs where in its stacked parameters: Hugging Face's names, and GGUF's."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Of one layer: each parameter's name in Hugging Face's files, how many of its axes are a linear map's inputs, and its
# name in GGUF files, `blk.{layer}.{name}.weight`. Files store such a map as `[outputs, inputs]`; 0 is for what is no
# linear map and stored as it is.
IN_LAYER = {
    "attn_norm": ("input_layernorm", 0, "attn_norm"),
    "wq": ("self_attn.q_proj", 1, "attn_q"),
    "wk": ("self_attn.k_proj", 1, "attn_k"),
    "wv": ("self_attn.v_proj", 1, "attn_v"),
    "wo": ("self_attn.o_proj", 2, "attn_output"),
    "q_norm": ("self_attn.q_norm", 0, "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", 0, "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", 0, "ffn_norm"),
    "w_gate": ("mlp.gate_proj", 1, "ffn_gate"),
    "w_up": ("mlp.up_proj", 1, "ffn_up"),
    "w_down": ("mlp.down_proj", 1, "ffn_down"),
}
BODY = "model."  # what names begin with, but the head's
OUTSIDE = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "untied_head": ("lm_head", "output"),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the files, and where in the model's stacked parameters it belongs."""

    name: str
    path: tuple[str, ...]  # of the parameter
    index: tuple[int, ...]  # in it: () or (layer,)
    shape: tuple[int, ...]  # in the file
    linear: bool  # stored as [outputs, inputs]


def tensors_of(params: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield what the files hold for these stacked parameters, arrays or shapes, quantised or not."""
    for name, (file_name, _) in OUTSIDE.items():
        if name in params:
            yield Tensor(f"{file_name}.weight", (name,), (), tuple(params[name].shape), linear=False)
    for name, leaf in params["blocks"].items():
        file_name, n_inputs, _ = IN_LAYER[name]
        quantized = isinstance(leaf, Mapping)
        # Of a quantised matrix the scales know its shape: one for each block of 32 inputs, `[.., out, in / 32]`.
        stacked = tuple(leaf["scale"].shape) if quantized else tuple(leaf.shape)
        shape = stacked[1:]
        if quantized:
            shape = (shape[0], 32 * shape[1])
        elif n_inputs:
            shape = (math.prod(shape[n_inputs:]), math.prod(shape[:n_inputs]))
        for layer in range(stacked[0]):
            full_name = f"model.layers.{layer}.{file_name}.weight"
            yield Tensor(full_name, ("blocks", name), (layer,), shape, linear=bool(n_inputs))


def from_gguf(name: str) -> str:
    """Return Hugging Face's name of a GGUF file's tensor; one that is not known as it is."""
    outside = {f"{theirs}.weight": f"{file_name}.weight" for file_name, theirs in OUTSIDE.values()}
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)) is None:
        return outside.get(name, name)
    of_layer = {theirs: file_name for file_name, _, theirs in IN_LAYER.values()}
    return f"model.layers.{match[1]}.{of_layer[match[2]]}.weight" if match[2] in of_layer else name
