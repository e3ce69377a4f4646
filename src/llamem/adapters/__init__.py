"""Low-rank adapters over one frozen model: any number of them, each sequence of a batch with its own."""

from typing import TYPE_CHECKING

from jaxmem._lazy import lazy_names

if TYPE_CHECKING:
    from llamem.adapters.lora import TARGET_MODULES, Adapters, LoraConfig, merge_adapter
    from llamem.adapters.step import abstract_lora_step, init_lora_state, lora_losses, make_lora_step
    from llamem.adapters.weights import IN_LAYERS, adapted_head

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
