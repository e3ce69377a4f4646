"""One update of many adapters at once: each as if it were trained alone, and the model under them frozen."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from llamem.layers.context import local_positions
from llamem.layers.offload import is_on_host
from llamem.llama.config import LlamaConfig
from llamem.llama.host_memory import host_sharding, of_matrices
from llamem.llama.lora import IN_LAYERS, Adapters, LoraConfig
from llamem.llama.lora_products import adapted_head
from llamem.llama.plan import Plan
from llamem.llama.sharding import MeshShape, gather_weight, parameter_specs, shardings
from llamem.llama.tables import whole_logits
from llamem.losses.choice import choose_tiles
from llamem.losses.cross_entropy import tiled_cross_entropy
from llamem.train.optimizers import make_optimizer
from llamem.train.sharded_step import batch_spec, check_sizes, on_mesh
from llamem.train.step import TrainSettings, TrainState, make_model

Batch = tuple[Any, Any, Any]  # inputs [B, T], targets [B, T], the adapter of each sequence [B]
IGNORED = -100  # a target that does not count


def init_lora_state(adapters: Adapters, settings: TrainSettings) -> TrainState:
    """The state before the first step: updates of each adapter `[A]`, the adapters, their moments. No weight is in it.

    Under `jax.eval_shape`, with abstract adapters, it is shapes only.
    """
    if not isinstance(adapters, Adapters) or not isinstance(settings, TrainSettings):
        raise TypeError(f"init_lora_state({type(adapters).__name__}, {settings!r}): expected Adapters, TrainSettings.")
    moments = make_optimizer(settings, _norm).init(adapters.weights)
    # optax counts updates in scalars; here every adapter counts its own. Each in a buffer of its own, to be donated.
    moments = jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.zeros(adapters.count, leaf.dtype), moments)
    return TrainState(jnp.zeros(adapters.count, jnp.int32), adapters, moments)


def make_lora_step(
    graphdef: nnx.GraphDef, settings: TrainSettings, learning_rates: Sequence[float] | None = None
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Array]]]:
    """`step(state, base, (inputs_BT, targets_BT, adapter_B)) -> state, metrics`, to be jitted with the state donated.

    `base` are the parameters of the frozen model; no gradient of them is computed. Every adapter is trained as if its
    sequences were alone in the batch: its loss is the mean over its own tokens, its gradient's norm is clipped by
    itself, and warm-up, decay and the optimizer's bias corrections follow its own number of updates. An adapter without
    a token that counts (targets of -100 do not) stays as it is, bit by bit, with its moments and its count.

    `learning_rates`: the peak rate of each adapter; without them all have that of the settings. On a mesh adapters are
    whole on every device, and lie as `abstract_lora_step` says. Metrics, each `[A]`: `loss` (mean over the adapter's
    tokens, nats; NaN where it has none, and for all where an id in `adapter_B` is none), `grad_norm`, `tokens`.
    """
    if not isinstance(graphdef, nnx.GraphDef) or not isinstance(settings, TrainSettings):
        raise TypeError(
            f"make_lora_step({type(graphdef).__name__}, {settings!r}): expected nnx.graphdef(model), TrainSettings."
        )
    if settings.clip != "global" or settings.rounding != "nearest":
        raise ValueError(
            f"TrainSettings(clip={settings.clip!r}, rounding={settings.rounding!r}) for adapters: each is clipped by "
            "the norm of its own gradients, and its weights are f32. Leave clip='global' and rounding='nearest'."
        )
    optimizer = make_optimizer(settings, _norm)
    peaks = None if learning_rates is None else _check_rates(learning_rates)

    def step(state: TrainState, base: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        plan = nnx.merge(graphdef, base).plan
        mesh = plan.mesh
        _check_plan(plan)
        base = of_matrices(base, is_on_host) if plan.weights == "host" else base
        if peaks is not None and len(peaks) != state.params.count:
            raise ValueError(f"learning_rates={peaks}: expected one for each of {state.params.count} adapters.")
        rates_A = jnp.ones(state.params.count) if peaks is None else jnp.asarray(peaks) / settings.learning_rate

        def update(state: TrainState, base: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
            metrics, grads = losses_and_grads(graphdef, settings, base, state.params, batch)
            weights = state.params.weights
            axes = _adapter_axes(weights), _adapter_axes(state.opt_state)

            def one(grads: Any, moments: Any, weights: Any, rate: Array) -> tuple[Any, Any, Array]:
                updates, moments = optimizer.update(grads, moments, weights)
                updates = updates if peaks is None else jax.tree.map(lambda u: rate.astype(u.dtype) * u, updates)
                return optax.apply_updates(weights, updates), moments, _norm(grads)

            each = jax.vmap(one, in_axes=(axes[0], axes[1], axes[0], 0), out_axes=(axes[0], axes[1], 0))
            *new, norm_A = each(grads, state.opt_state, weights, rates_A)
            present_A = metrics["tokens"] > 0
            old = weights, state.opt_state
            weights, moments = jax.tree.map(partial(_where_present, present_A), tuple(new), old, axes)
            state = TrainState(state.step + present_A, state.params.with_weights(weights), moments)
            return state, metrics | {"grad_norm": norm_A}

        specs = (PartitionSpec(), parameter_specs(base, mesh), batch_spec(mesh))
        return on_mesh(update, mesh, specs, PartitionSpec())(state, base, batch)

    return step


def abstract_lora_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan, lora: LoraConfig
) -> tuple[Callable[..., Any], TrainState, Any, Batch]:
    """The step of adapters over a model that is never built, with the shapes of its arguments.

    Returns `(step, state, base, batch)` for `llamem.compile_report(..., donate_argnums=(0,), chip=...)`.
    With a mesh in the plan the shapes say how they lie on it. Raises ValueError for sizes that do not divide.
    """
    mesh = plan.mesh
    graphdef, base = nnx.split(nnx.eval_shape(lambda: make_model(config, settings, plan)))
    if plan.weights == "host":
        base = of_matrices(base, lambda leaf: _placed(leaf, host_sharding()))
    state = jax.eval_shape(lambda: init_lora_state(Adapters.create(config, lora, rngs=nnx.Rngs(0)), settings))
    B, T = settings.batch_size, settings.seq_len
    tokens_BT, adapter_B = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B,), jnp.int32)
    batch = (tokens_BT, tokens_BT, adapter_B)
    if mesh.devices > 1:
        check_sizes(mesh, B, T, settings.accumulate)
        everywhere = NamedSharding(mesh.mesh(), PartitionSpec())
        state, batch = _placed(state, everywhere), _placed(batch, shardings(batch_spec(mesh), mesh))
        base = jax.tree.map(_placed, base, shardings(parameter_specs(base, mesh), mesh))
    return make_lora_step(graphdef, settings), state, base, batch


def _check_plan(plan: Plan) -> None:
    if plan.update == "in_backward" or plan.moments == "host":
        raise ValueError(
            f"Plan(update={plan.update!r}, moments={plan.moments!r}) for adapters: their gradients and moments are too "
            "small to be worth a place or a moment of their own. Leave update='after' and moments='device'; "
            "weights='host' is for the frozen model under them."
        )


def lora_loss(
    graphdef: nnx.GraphDef,
    base: Any,
    adapters: Adapters,
    weights_B: Float[Array, " B"],
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    adapter_B: Int[Array, " B"],
) -> Float[Array, ""]:
    """The sum over tokens of cross-entropy times the weight of the token's sequence, tiled as the model's plan says.

    Targets of -100 do not count. Its gradient for `weights_B` are the summed losses of the sequences. On a mesh, inside
    `shard_map`, a device's share: over the devices that hold different tokens they sum to it.
    """
    model = nnx.merge(graphdef, base)
    plan, mesh = model.plan, model.plan.mesh
    hidden_BTD = model.hidden(inputs_BT, adapters=adapters, adapter_B=adapter_B)
    if mesh.context_axis:
        targets_BT = targets_BT[:, local_positions(targets_BT.shape[1], mesh.context_axis)]
    head_VD = gather_weight("untied_head", model.head, mesh, hidden_BTD.dtype)
    hidden_BTW, head = adapted_head(hidden_BTD, head_VD, adapters, adapter_B, mesh.tensor_axis)
    weights_BT = jnp.broadcast_to(weights_B[:, None], targets_BT.shape)
    if plan.loss_tiles is None and not mesh.tensor_axis:
        with jax.named_scope("logits"):
            whole_VW = jnp.concatenate([part.astype(hidden_BTW.dtype) for part in head], axis=1)
            logits_BTV = whole_logits(hidden_BTW, whole_VW)
        counts_BT = targets_BT != IGNORED
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, jnp.where(counts_BT, targets_BT, 0))
        return jnp.sum(jnp.where(counts_BT, loss_BT * weights_BT, 0))
    axis, num_tiles = plan.loss_axis, plan.loss_tiles or 1
    if mesh.tensor_axis:
        axis = "vocab"
    elif num_tiles == "auto":
        # Told that the head is frozen: tiles of tokens then take two products, and need no sum of its gradients.
        D, V, dtype = hidden_BTW.shape[-1], head_VD.shape[0], hidden_BTW.dtype
        axis = "tokens" if axis == "auto" and len(head) > 1 else axis
        choice = choose_tiles(targets_BT.size, D, V, dtype=dtype, head="frozen", axis=axis)
        axis, num_tiles = choice.axis, choice.num_tiles
    return tiled_cross_entropy(
        hidden_BTW,
        head if len(head) > 1 else head[0],
        targets_BT,
        weights=weights_BT,
        reduction="sum",
        ignore_index=IGNORED,
        num_tiles=num_tiles,
        axis=axis,
        vocab_axis_name=mesh.tensor_axis,
    )


def losses_and_grads(
    graphdef: nnx.GraphDef, settings: TrainSettings, base: Any, adapters: Adapters, batch: Batch
) -> tuple[dict[str, Array], Any]:
    """Every adapter's mean loss and number of tokens, `[A]`, and the gradients of the sum of the losses.

    On a mesh, inside `shard_map`, from this device's part of the batch; the results are the same on all devices.
    """
    mesh = nnx.merge(graphdef, base).plan.mesh
    _, targets_BT, adapter_B = batch
    A, per_adapter = adapters.count, partial(jax.ops.segment_sum, segment_ids=adapter_B, num_segments=adapters.count)
    tokens_A = _psum(per_adapter(jnp.sum(targets_BT != IGNORED, axis=1)), mesh.over("batch"))
    weights_B = 1 / jnp.maximum(tokens_A, 1)[jnp.clip(adapter_B, 0, A - 1)]

    def loss(weights: Any, weights_B: Array, part: Batch) -> Array:
        return lora_loss(graphdef, base, adapters.with_weights(weights), weights_B, *part)

    grad = jax.grad(loss, argnums=(0, 1))
    if settings.accumulate == 1:
        grads, loss_B = grad(adapters.weights, weights_B, batch)
    else:
        parts = jax.tree.map(lambda x: x.reshape(settings.accumulate, -1, *x.shape[1:]), (weights_B, batch))

        def add(total: Any, part: tuple[Array, Batch]) -> tuple[Any, Array]:
            grads, loss_B = grad(adapters.weights, *part)
            return jax.tree.map(jnp.add, total, grads), loss_B

        grads, loss_B = lax.scan(add, jax.tree.map(jnp.zeros_like, adapters.weights), parts)
        loss_B = loss_B.reshape(-1)
    # An id that is none belongs to no adapter's sum: its NaN is told to all of them.
    nowhere = jnp.sum(jnp.where((adapter_B < 0) | (adapter_B >= A), jnp.nan, 0.0))
    loss_A = _psum(per_adapter(loss_B * weights_B) + nowhere, mesh.over("batch", "sequence"))
    metrics = {"loss": jnp.where(tokens_A > 0, loss_A, jnp.nan), "tokens": tokens_A}
    return metrics, jax.tree.map_with_path(lambda path, g: _psum(g, _summed_over(path, mesh)), grads)


def _summed_over(path: tuple[Any, ...], mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes whose devices have summands of this gradient each: on the others all have the same."""
    part, target = (entry.key for entry in path[-2:])
    # In a layer devices of "tensor" compute for their heads and their part of F, and B of the head meets their rows.
    in_parts = target in IN_LAYERS or (part, target) == ("b", "head")
    return mesh.over("batch", "sequence") + ((mesh.tensor_axis,) if in_parts and mesh.tensor_axis else ())


def _psum(x: Array, axes: tuple[str, ...]) -> Array:
    return lax.psum(x, axes) if axes else x


def _adapter_axes(tree: Any) -> Any:
    """For every leaf of adapters' weights, or of an optimizer's state of them, which axis the adapters are."""

    def axis(path: tuple[Any, ...], _: Any) -> int:
        return int(any(getattr(entry, "key", None) in IN_LAYERS for entry in path))

    return jax.tree.map_with_path(axis, tree)


def _where_present(present_A: Array, new: Array, old: Array, axis: int) -> Array:
    shape = [-1 if i == axis else 1 for i in range(new.ndim)]
    return jnp.where(present_A.reshape(shape), new, old)


def _norm(grads: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads)))


def _placed(shapes: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


def _check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < 1e300 for rate in rates):
        raise ValueError(f"learning_rates={rates!r}: expected finite numbers above 0, one for each adapter.")
    return tuple(map(float, rates))
