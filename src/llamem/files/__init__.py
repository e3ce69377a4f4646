"""Open models and adapters in and out: Hugging Face's folders, GGUF, PEFT."""

from llamem.files.hf_config import config_from_hf, config_to_hf
from llamem.files.peft import load_adapters, save_adapter
from llamem.files.pretrained import load_pretrained, save_pretrained, smollm2_file

__all__ = [
    "config_from_hf",
    "config_to_hf",
    "load_adapters",
    "load_pretrained",
    "save_adapter",
    "save_pretrained",
    "smollm2_file",
]
