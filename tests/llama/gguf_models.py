"""Small GGUF files for tests: any fields, any tensors, in any type that `gguf` can write."""

import gguf
import numpy as np

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
        quantized = gguf.quants.quantize(np.asarray(array, np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
