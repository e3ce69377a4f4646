"""Weights, moments and layers' inputs that wait in the host's memory, and the step that fetches them."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.host.memory import same_places

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
