"""The plain Llama: its shape, its weights, how a step of it is computed, and tokens out of it."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.llama.config import PRESETS, LlamaConfig, RopeScaling
    from llamem.llama.model import Block, KVCache, Llama, rope_tables, rotate
    from llamem.llama.plan import ACTIVATIONS, MeshShape, Plan
    from llamem.llama.sample import generate
    from llamem.llama.weights import rms_norm

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
