"""Small GGUF files for tests: any fields, any tensors, whole models."""

import gguf
import numpy as np
from flax import nnx

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "th", "the"]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.eos_token_id": 2,
}


def write_gguf(file, fields, tensors=(), architecture="llama"):
    """`tensors`: `(name, array, type)`, the type by its name in GGUF."""
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, array, kind in tensors:
        raw = _super_blocks(array, kind) if kind in ("Q4_K", "Q6_K") else None
        raw = (
            gguf.quants.quantize(np.asarray(array, np.float32), gguf.GGMLQuantizationType[kind]) if raw is None else raw
        )
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _super_blocks(array, kind):
    """`gguf` reads these types and does not write them: random bytes with sensible scales, of the array's shape."""
    rng, size = np.random.default_rng(array.size), {"Q4_K": 144, "Q6_K": 210}[kind]
    raw = rng.integers(0, 256, (array.size // 256, size), np.uint8)
    scales = rng.uniform(1e-4, 2e-4, (len(raw), 2)).astype(np.float16).view(np.uint8)
    raw[:, {"Q4_K": slice(0, 4), "Q6_K": slice(208, 210)}[kind]] = scales[:, : {"Q4_K": 4, "Q6_K": 2}[kind]]
    return raw.reshape(len(array), -1)


def fields_of(config):
    """What llama.cpp's converter writes of such a model."""
    name = "qwen3" if config.qk_norm else "llama"
    fields = {
        "block_count": config.n_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
    }
    return {f"{name}.{field}": value for field, value in fields.items()}


def tensors_of(model, types):
    """The model's tensors as llama.cpp writes them; `types` by the parameter's name in GGUF, or "" for the others."""
    c, params = model.config, nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def rotary_pairs_beside_each_other(rows, heads):
        # llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
        return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)

    for name, leaf in (("token_embd", "embedding"), ("output_norm", "norm"), ("output", "untied_head")):
        if leaf in params:
            yield f"{name}.weight", np.asarray(params[leaf]), types.get(name, "F32")
    names = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm", "attn_q": "wq", "attn_k": "wk", "attn_v": "wv"}
    names |= {"attn_output": "wo", "ffn_gate": "w_gate", "ffn_up": "w_up", "ffn_down": "w_down"}
    names |= {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"} if c.qk_norm else {}
    for layer in range(c.n_layers):
        for name, leaf in names.items():
            w = np.asarray(params["blocks"][leaf][layer])
            if w.ndim > 1:
                w = w.reshape(-1, w.shape[-1]).T if leaf == "wo" else w.reshape(len(w), -1).T
            if name in ("attn_q", "attn_k") and not c.qk_norm:
                w = rotary_pairs_beside_each_other(w, c.n_heads if name == "attn_q" else c.n_kv_heads)
            kind = types.get(name, types.get("", "F32")) if w.ndim > 1 else "F32"
            kind = kind[layer] if isinstance(kind, tuple) else kind
            yield f"blk.{layer}.{name}.weight", np.ascontiguousarray(w), kind


def model_file(file, model, types=None, more=(), **fields):
    """A whole model as a file; `fields` change some of it, by their last words."""
    name = "qwen3" if model.config.qk_norm else "llama"
    told = fields_of(model.config) | {f"{name}.{field.replace('__', '.')}": value for field, value in fields.items()}
    return write_gguf(file, told, [*tensors_of(model, types or {}), *more], architecture=name)
