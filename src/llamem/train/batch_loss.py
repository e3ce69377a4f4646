"""The loss of a model on a batch, and its gradients: on one device, or inside `shard_map` on each of several."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llamem.layers.context import local_positions
from llamem.layers.parts import order_gradients
from llamem.llama.plan import Plan
from llamem.llama.sharding import MeshShape, gather_weight, parameter_specs
from llamem.llama.tables import whole_logits
from llamem.losses.cross_entropy import tiled_cross_entropy
from llamem.train.settings import TrainSettings
from llamem.train.sharded_step import batch_spec, for_gradients_outside, on_mesh, sum_gradients, sum_over_batch


def loss_fn(
    graphdef: nnx.GraphDef, params: Any, inputs_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of the targets under the model, tiled as the model's plan says.

    To be called, and differentiated, outside of `shard_map`, whatever the plan's mesh.
    """
    mesh = _mesh(graphdef, params)

    def share(params: Any, *batch: Array) -> Array:
        return sum_over_batch(local_loss(graphdef, for_gradients_outside(params, mesh), *batch), mesh)

    specs = (parameter_specs(params, mesh), batch_spec(mesh), batch_spec(mesh))
    return on_mesh(share, mesh, specs, PartitionSpec())(params, inputs_BT, targets_BT)


def local_loss(
    graphdef: nnx.GraphDef, params: Any, inputs_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"]
) -> Float[Array, ""]:
    """One device's share of `loss_fn`, inside `shard_map`: over the devices that hold different tokens they sum to it.

    On one device all of it.
    """
    model = nnx.merge(graphdef, params)
    return loss_of_hidden(model.plan, model.hidden(inputs_BT), model.head, targets_BT)


def loss_of_hidden(
    plan: Plan, hidden_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V _"], targets_BT: Int[Array, "B _"]
) -> Float[Array, ""]:
    """`local_loss` from the model's last hidden states, normed, and the head as this device stores it."""
    mesh = plan.mesh
    if mesh.context_axis:
        targets_BT = targets_BT[:, local_positions(targets_BT.shape[1], mesh.context_axis)]
    # Else the head's whole gradient, not yet in its type nor divided, would stay for all layers' backward passes.
    hidden_BTD, head_VD = order_gradients(hidden_BTD, head_VD)
    # Gathered once, before the loop over tiles; where the vocabulary is split, each device has its rows.
    head_VD = gather_weight("untied_head", head_VD, mesh, hidden_BTD.dtype)
    shares = mesh.devices // mesh.tensor  # parts into which the tokens are cut
    if plan.loss_tiles is not None or mesh.tensor_axis:
        return tiled_cross_entropy(
            hidden_BTD,
            head_VD,
            targets_BT,
            num_tiles=plan.loss_tiles or 1,
            axis="vocab" if mesh.tensor_axis else plan.loss_axis,
            vocab_axis_name=mesh.tensor_axis,
            normalizer=None if shares == 1 else targets_BT.size * shares,
        )
    with jax.named_scope("logits"):  # by this name a timeline knows them
        logits_BTV = whole_logits(hidden_BTD, head_VD)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean() / shares


def loss_and_grads(
    graphdef: nnx.GraphDef, settings: TrainSettings, params: Any, batch: tuple[Array, Array]
) -> tuple[Float[Array, ""], Any]:
    """The mean loss and its gradients, each in the type of its parameter; on a mesh, inside `shard_map`, their parts.

    With `accumulate > 1` gradients are made and added inside a scan, in f32: autodiff through a loop over
    micro-batches, or a Python loop, would keep the residuals of all of them.
    """
    mesh = _mesh(graphdef, params)
    grad = jax.value_and_grad(lambda params, part: local_loss(graphdef, params, *part))
    if settings.accumulate == 1:
        loss, grads = grad(params, batch)
        return sum_over_batch(loss, mesh), sum_gradients(grads, mesh)
    parts = jax.tree.map(lambda a: a.reshape(settings.accumulate, -1, a.shape[-1]), batch)

    def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grad(params, part)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
    (loss, grads), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), parts)
    loss, grads = sum_over_batch(loss, mesh), sum_gradients(grads, mesh)
    loss, grads = jax.tree.map(lambda t: t / settings.accumulate, (loss, grads))
    return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _mesh(graphdef: nnx.GraphDef, params: Any) -> MeshShape:
    return nnx.merge(graphdef, params).plan.mesh
