"""Anyone's layers in less memory: rematerialised stacks, tiles, attention."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.layers.attention import Implementation, causal_attention
    from llamem.layers.attention_tiles import flash_attention
    from llamem.layers.partial_sums import sum_parts
    from llamem.layers.remat import POLICIES, Policy, checkpoint
    from llamem.layers.stack import Mode, apply_stack, stack_layers, unstack_layers
    from llamem.layers.tiling import tiled_map, tiled_sum

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
