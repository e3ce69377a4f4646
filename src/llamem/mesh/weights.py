"""Weights of which a device of a mesh has its part, inside `jax.shard_map(..., check_vma=False)`.

FSDP and context parallelism: a matrix is gathered when a layer asks for it, rematerialised with the layer and so never
whole for more than one, and its gradient is scattered again. Tensor parallelism: a norm that enters products of which
each device does a part, matrices whose results are summands, a table with some of the rows.
"""

import dataclasses
from typing import Any

from jax import lax
from jaxtyping import Array, Float, Int

from llamem.llama.model import Attend, Llama
from llamem.llama.plan import MeshShape
from llamem.llama.weights import MATRICES, PARAMETERS, Matrix, Norm, Table
from llamem.mesh.collectives import enter, gather, leave, look_up
from llamem.mesh.context import context_attention, local_positions
from llamem.quantized.blocks import QuantizedMatrix


class SplitMatrix(Matrix):
    """A part along D, which is the axis `dim`, of what the devices of `axes` have together.

    Over `tensor_axis` each device has its heads, or its part of F.
    """

    axes: tuple[str, ...]
    dim: int
    tensor_axis: str | None

    def ready(self, dtype: Any) -> Matrix:
        """Return the matrix whole along D; its gradient is summed over the devices, and each gets its part."""
        w = gather(self[...], self.axes, self.dim, dtype)
        if self.tensor_axis is None:
            return Matrix(w, n_in=self.n_in)
        return SummandMatrix(w, n_in=self.n_in, tensor_axis=self.tensor_axis)


class SummandMatrix(Matrix):
    """The inputs of the devices of `tensor_axis` are parts of the whole, so what they compute is to be summed."""

    tensor_axis: str
    is_whole = False

    def total(self, out: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the sum of what the devices computed."""
        return leave(out, self.tensor_axis)


class SplitTable(Table):
    """Some columns of what the devices of `axes` have together, and some rows over `tensor_axis`."""

    axes: tuple[str, ...]
    tensor_axis: str | None

    @property
    def vocab_axis(self) -> str | None:  # pyrefly: ignore
        """The mesh axis whose devices have some rows each."""
        return self.tensor_axis

    def ready(self, dtype: Any) -> "SplitTable":
        """Return this device's rows, whole along D."""
        return SplitTable(gather(self[...], self.axes, 1, dtype), axes=(), tensor_axis=self.tensor_axis)

    def look_up(self, ids: Int[Array, "*N"], dtype: Any) -> Float[Array, "*N D"]:
        """Return rows for own ids; no device ever holds the table whole."""
        return look_up(self[...].astype(dtype), ids.astype("int32"), self.axes, self.tensor_axis)


class EnteringNorm(Norm):
    """A norm whose result every device of `tensor_axis` reads for its part: gradients are summed here, once."""

    tensor_axis: str

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Return the norm; in the backward pass its gradients, one of each part, are summed."""
        return enter(super().__call__(x), self.tensor_axis)


@dataclasses.dataclass(frozen=True)
class ContextAttend(Attend):
    """How one device's queries meet everybody's keys and values, where the devices of `axis` share a sequence."""

    axis: str = "context"

    def own(self, tokens_BT: Int[Array, "B T"]) -> tuple[Int[Array, "B t"], Int[Array, " t"]]:
        """Return the tokens of this device, and where in the sequence they stand."""
        positions_T = local_positions(tokens_BT.shape[1], self.axis)
        return tokens_BT[:, positions_T], positions_T

    def __call__(self, q_BTHh: Array, k_BTKh: Array, v_BTKh: Array, segments_BT: Array | None = None) -> Array:
        """Return what each query found. Raise ValueError for packed documents."""
        if segments_BT is not None:
            raise ValueError(
                "segments_BT: packed documents are not computed with context parallelism. Give every document a "
                "sequence of its own, or choose a mesh with context=1."
            )
        return context_attention(q_BTHh, k_BTKh, v_BTKh, axis=self.axis, implementation=self.implementation)


def split(model: Llama, mesh: MeshShape) -> Llama:
    """Put the weights of one device of a mesh in the place of plain ones; return the model, which is changed.

    Its arrays are this device's parts already. Raise ValueError outside of the mesh.
    """
    _check_inside(mesh)
    axes, tensor_axis, blocks = mesh.over("d_model"), mesh.tensor_axis, model.blocks
    for name in MATRICES:
        matrix, names = getattr(blocks, name), PARAMETERS[name]
        if isinstance(matrix, QuantizedMatrix):  # whole on every device
            continue
        summed = tensor_axis if names[-1] == "d_model" else None
        part = SplitMatrix(matrix[...], n_in=matrix.n_in, axes=axes, dim=names.index("d_model"), tensor_axis=summed)
        setattr(blocks, name, part)
    for name in ("embedding", "untied_head"):
        if hasattr(model, name):
            setattr(model, name, SplitTable(getattr(model, name)[...], axes=axes, tensor_axis=tensor_axis))
    for name in ("attn_norm", "mlp_norm") if tensor_axis else ():
        norm = getattr(blocks, name)
        setattr(blocks, name, EnteringNorm(norm[...], eps=norm.eps, tensor_axis=tensor_axis))
    if mesh.context_axis:
        model.attend = ContextAttend(model.plan.attention, mesh.context_axis)
    return model


def _check_inside(mesh: MeshShape) -> None:
    """Raise ValueError where the function that calls this is not the program of one device of such a mesh."""
    try:
        sizes = {name: lax.axis_size(name) for name in mesh.axes}
    except NameError:
        sizes = {}
    if sizes != mesh.axes:
        raise ValueError(
            f"the plan's mesh has the axes {mesh.axes}, and this is computed outside of it. A training step goes "
            "there by itself; to call the model, give it a plan without a mesh: JAX then shares the work out by "
            "itself, after where the weights lie."
        )
