"""What stands around the adapter of notebook 09: what a layer asks of a matrix that has one."""

from typing import Any, Self

from flax import nnx


class LayerMatrix(nnx.Module):
    """What a layer asks of a matrix beside `linear`: a subclass is made of a frozen `base`, `down` and `up`."""

    is_trained = False  # the base wants no gradient
    base: Any
    down: Any
    up: Any

    def ready(self, dtype: Any) -> Self:
        """Return all three in the type that the layer computes with, the base out of its blocks."""
        make: Any = type(self)
        return make(self.base.ready(dtype), *(part[...].astype(dtype) for part in (self.down, self.up)))

    def total(self, out: Any) -> Any:
        """Return what `linear` returned: on one device nothing is left to add up."""
        return out
