"""Weights that add, for each sequence, what its own adapter says.

Each sequence's `A` `[r, in]` and `B` `[r, out]` are gathered, then multiplied as a batch: two thin products per matrix,
whatever the number of adapters. Nothing of `[in, out]` is made for one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llamem.llama.model import Llama
from llamem.llama.weights import MATRICES, cut, linear_together

IN_LAYERS = ("q", "k", "v", "o", "gate", "up", "down")
PARAMETER_OF = dict(zip(IN_LAYERS, MATRICES, strict=True))  # of a target


Own = Callable[[Any, Any], tuple[Any, Any]]


class AdapterNumbers(nnx.Param):
    """Numbers of an adapter as they were handed to a model: it is trained outside of it."""


_PARTS = ("a", "b", "scale", "adapter_B")


class _Adapted(nnx.Module):
    """`base`, which is frozen, and `a` `[A, r, in]`, `b` `[A, r, out]`, `scale` `[A]`; none where `a` is None.

    `adapter_B` says which adapter each sequence uses. `own(a, b)` cuts out what of both meets this device's part of
    the base, when it gets ready; None where that is all of them.
    """

    is_trained = False

    def __init__(self, base: Any, a: Any, b: Any, scale: Any, adapter_B: Any, own: Own | None = None):
        self.base, self.is_adapted, self.own = base, a is not None, own
        if self.is_adapted:
            self.a, self.b, self.scale, self.adapter_B = map(AdapterNumbers, (a, b, scale, adapter_B))

    @property
    def parts(self) -> list[Any]:
        """The arrays `a`, `b`, `scale` and `adapter_B`; None each where there is no adapter."""
        return [getattr(self, name)[...] if self.is_adapted else None for name in _PARTS]

    def ready(self, dtype: Any) -> Any:
        """Return the weight with its base in the type of the products."""
        a, b, *rest = self.parts
        a, b = self.own(a, b) if self.own and self.is_adapted else (a, b)
        return type(self)(self.base.ready(dtype), a, b, *rest)


class AdaptedMatrix(_Adapted):
    """A matrix that adds what adapters say."""

    tells_sequences_apart = True

    def linear(self, x: Float[Array, "B T *from"], dtype: Any = None) -> Float[Array, "B T *to"]:
        """Return `x W + scale (x A') B`, of each sequence its own A and B."""
        return self._plus(x, self.base.linear(x, dtype))

    def _plus(self, x: Array, out: Array) -> Array:
        if not self.is_adapted:
            return out
        a_ArI, b_ArO, scale_A, adapter_B = self.parts
        adapter_B = of_batch(adapter_B, len(x))
        z_BTr = project_in(x.reshape(*x.shape[:2], -1), a_ArI, scale_A, adapter_B)
        b_BrO = chosen(b_ArO, adapter_B).astype(out.dtype)
        return out + jnp.einsum("BTr,BrO->BTO", z_BTr, b_BrO).reshape(out.shape)

    @property
    def is_whole(self) -> bool:
        """Whether `linear` returns the result, or a summand of it."""
        return self.base.is_whole

    def total(self, out: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the whole result where `linear` returned a summand."""
        return self.base.total(out)

    def cut(self, n: int, axis: Literal["input", "output"]) -> "AdaptedMatrix":
        """Return n matrices, stacked, each with a part of the heads, and with that of A or of B that meets them."""
        with_heads = "a" if axis == "input" else "b"

        def part(name: str, x: Any) -> Any:
            if x is None:
                return None
            return cut(x, n, 2) if name == with_heads else jnp.broadcast_to(x, (n, *x.shape))

        return AdaptedMatrix(self.base.cut(n, axis), *map(part, _PARTS, self.parts))

    @classmethod
    def together(cls, matrices: "Sequence[AdaptedMatrix]", x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
        """Return `[m.linear(x) for m in matrices]`: one product of the bases, and each adapter's own."""
        outs = linear_together([m.base for m in matrices], x)
        return [m._plus(x, out) for m, out in zip(matrices, outs, strict=True)]


class AdaptedTable(_Adapted):
    """A head that adds what adapters say, if there are any of it. The embedding, which it may be too, is as it was."""

    @property
    def vocab_axis(self) -> str | None:
        """The mesh axis whose devices have some rows each."""
        return self.base.vocab_axis

    def at_hand(self) -> Float[Array, "V D"]:
        """Return the frozen numbers."""
        return self.base.at_hand()

    def look_up(self, ids: Int[Array, "*N"], dtype: Any) -> Float[Array, "*N D"]:
        """Return rows of the embedding."""
        return self.base.look_up(ids, dtype)

    def beside(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T W"], tuple[Float[Array, "V _"], ...]]:
        """Return hidden states and the matrices that side by side are the adapted head."""
        x, (head_VD,) = self.base.beside(x)
        return beside(x, head_VD, *self.parts) if self.is_adapted else (x, (head_VD,))


def put_on(
    model: Llama, adapters: Any, adapter_B: Int[Array, " B"], own_of: Callable[[str], Own | None] = lambda target: None
) -> Llama:
    """Put adapted weights in the place of a model's; return the model, which is changed.

    `own_of(target)`: what cuts out this device's part of that target's adapters.
    """
    n_layers, blocks = model.config.n_layers, model.blocks
    adapter_LB = jnp.broadcast_to(adapter_B, (n_layers, *adapter_B.shape))  # the layers' loop takes one row each

    def given(target: str, ids: Array) -> tuple[Any, ...]:
        if target not in adapters.a:
            return (None,) * 4
        return adapters.a[target], adapters.b[target], adapters.scale[target], ids, own_of(target)

    for target, name in PARAMETER_OF.items():
        setattr(blocks, name, AdaptedMatrix(getattr(blocks, name), *given(target, adapter_LB)))
    name = "embedding" if model.config.tied_head else "untied_head"
    setattr(model, name, AdaptedTable(getattr(model, name), *given("head", adapter_B)))
    return model


def of_batch(adapter_B: Int[Array, " _"], batch_size: int) -> Int[Array, " B"]:
    """Return each sequence's adapter; one for all where there is one. Raise ValueError for another batch's."""
    if len(adapter_B) not in (1, batch_size):
        raise ValueError(
            f"adapter_B names adapters of {len(adapter_B)} sequences, and these are {batch_size}: pass one for each, "
            "adapters.on(model, adapter_B)."
        )
    return jnp.broadcast_to(adapter_B, batch_size)


def chosen(array_A: Float[Array, "A *rest"], adapter_B: Int[Array, " B"]) -> Float[Array, "B *rest"]:
    """Return each sequence's adapter; NaN for an id that is none."""
    known_B = jnp.where(adapter_B < 0, array_A.shape[0], adapter_B)  # a negative id would count from the end
    return array_A.at[known_B].get(mode="fill", fill_value=jnp.nan)


def project_in(
    x_BTI: Float[Array, "B T I"], a_ArI: Float[Array, "A r I"], scale_A: Float[Array, " A"], adapter_B: Int[Array, " B"]
) -> Float[Array, "B T r"]:
    """Return `scale (x A')` of each sequence, in the type of `x`.

    A is scaled and rounded before the product: one in f32 would have a gradient for `x` of f32, twice as large as any
    other array of a step. It is chosen before that, so that gradients of sequences add up in f32.
    """
    a_BrI = chosen(a_ArI, adapter_B) * chosen(scale_A, adapter_B)[:, None, None]
    return jnp.einsum("BTI,BrI->BTr", x_BTI, a_BrI.astype(x_BTI.dtype))


def beside(
    x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"], a_ArD: Any, b_ArV: Any, scale_A: Any, adapter_B: Any
) -> tuple[Float[Array, "B T W"], tuple[Float[Array, "V _"], ...]]:
    """Return hidden states and two matrices that stand side by side as the head.

    The logits `x W' + scale (x A') B` are one wider product: `[x, z] [W, B_1 .. B_A]'`, in which `z` holds `scale x A'`
    in the columns of the sequence's own adapter and zeros in the others. So the head comes back as two matrices, the
    frozen `[V, D]` as it was and the adapters' `[V, min(A, B) r]`, and hidden with as many columns.
    """
    count, adapter_B = len(b_ArV), of_batch(adapter_B, len(x_BTD))
    z_BTr = project_in(x_BTD, a_ArD, scale_A, adapter_B)
    if count <= x_BTD.shape[0]:
        unknown_B = (adapter_B < 0) | (adapter_B >= count)  # their z is NaN, and belongs somewhere
        own_BA = (adapter_B[:, None] == jnp.arange(count)) | unknown_B[:, None]
    else:  # fewer columns with one block for each sequence
        b_ArV, own_BA = chosen(b_ArV, adapter_B), jnp.eye(x_BTD.shape[0], dtype=bool)
    z_BTAr = jnp.where(own_BA[:, None, :, None], z_BTr[:, :, None, :], 0)
    wide_BTW = jnp.concatenate([x_BTD, z_BTAr.reshape(*z_BTr.shape[:2], -1)], axis=-1)
    b_VR = b_ArV.astype(x_BTD.dtype).reshape(-1, b_ArV.shape[-1]).T
    return wide_BTW, (head_VD, b_VR)
