"""Open models and adapters in and out: Hugging Face's folders, GGUF, PEFT."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.files.hf_config import config_from_hf, config_to_hf
    from llamem.files.peft import load_adapters, save_adapter
    from llamem.files.pretrained import load_pretrained, save_pretrained, smollm2_file

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
