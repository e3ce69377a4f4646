"""Low-rank adapters over one frozen model: any number of them, each sequence of a batch with its own."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.adapters.adapted_weights import IN_LAYERS
    from llamem.adapters.lora import TARGET_MODULES, Adapters, LoraConfig, merge_adapter
    from llamem.adapters.lora_step import init_lora_state, lora_losses, make_lora_step

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
