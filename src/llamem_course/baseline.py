"""The best that a loss does without tiles: what tiling is compared with, alone and in a whole training step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Integer

from jaxmem import Report, compile_report
from jaxmem.report import Depth
from llamem.layers.partial_sums import order_gradients
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import Plan
from llamem.runs import abstract_step
from llamem.train import TrainSettings, make_model

Loss = Callable[[Any, Any, Any], Any]


@jax.custom_vjp
def lean_loss(
    hidden_ND: Float[Array, "N D"], head_VD: Float[Array, "V D"], targets_N: Integer[Array, " N"]
) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats, with all logits at once, kept in the type of the hidden states.

    In bfloat16 the logits take half of what they take in float32, and so does their gradient. No part of them is
    computed twice: three matrix products. Logits rounded to 8 bits make the loss and the gradients less exact.
    """
    return _forward(hidden_ND, head_VD, targets_N)[0]


def _forward(hidden_ND: Any, head_VD: Any, targets_N: Any) -> tuple[Any, Any]:
    logits_NV = hidden_ND @ head_VD.astype(hidden_ND.dtype).T
    wide_NV = logits_NV.astype(jnp.float32)  # inside of a fusion: no array of this size is written
    lse_N = jax.nn.logsumexp(wide_NV, axis=1)
    own_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0].astype(jnp.float32)
    return jnp.mean(lse_N - own_N), (hidden_ND, head_VD, targets_N, logits_NV, lse_N)


def _backward(kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    hidden_ND, head_VD, targets_N, logits_NV, lse_N = kept
    d_NV = jnp.exp(logits_NV.astype(jnp.float32) - lse_N[:, None])
    d_NV = d_NV - (targets_N[:, None] == jnp.arange(logits_NV.shape[1]))
    d_NV = (d_NV * (cotangent / len(targets_N))).astype(hidden_ND.dtype)
    dx_ND = d_NV @ head_VD.astype(hidden_ND.dtype)
    return dx_ND, (d_NV.T @ hidden_ND).astype(head_VD.dtype), None


lean_loss.defvjp(_forward, _backward)


def abstract_step_with(
    loss: Loss, config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()
) -> tuple[Callable[..., Any], Any, Any]:
    """Return `llamem.abstract_step` with a loss of `(hidden_ND, head_VD, targets_N)` in place of the plan's.

    The optimizer is AdamW with moments in the parameters' type, gradients are clipped by their norm.
    """
    _, state, batch = abstract_step(config, settings, plan)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, settings, plan)))
    rule = optax.chain(optax.clip_by_global_norm(settings.clip_norm or jnp.inf), optax.adamw(settings.learning_rate))

    def loss_of(params: Any, inputs_BT: Any, targets_BT: Any) -> Any:
        model = nnx.merge(graphdef, params)
        hidden_BTD, head_VD = order_gradients(model.hidden(inputs_BT), model.head)
        return loss(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), head_VD, targets_BT.reshape(-1))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, moments = state
        value, grads = jax.value_and_grad(loss_of)(params, *batch)
        updates, moments = rule.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, (state.params, jax.eval_shape(rule.init, state.params)), batch


def step_peak(model: str, seq_len: int, chip: str, loss: Loss | None = None, plan: Plan = Plan()) -> Report:
    """Return the report on a training step of a model in bfloat16, one sequence.

    `loss`: in place of the plan's. The state is donated.
    """
    config = LlamaConfig.from_name(model, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    settings = TrainSettings(batch_size=1, seq_len=seq_len)
    made = abstract_step_with(loss, config, settings, plan) if loss else abstract_step(config, settings, plan)
    return compile_report(made[0], *made[1:], donate_argnums=(0,), chip=chip)


def loss_report(loss: Loss, tokens: int, width: int, vocab: int, chip: str, *, depth: Depth = "memory") -> Report:
    """Return the report on a loss and its gradients, hidden states and head in bfloat16.

    With `depth="code"` it has a TPU compiler's estimate of the seconds.
    """
    shapes = (((tokens, width), "bfloat16"), ((vocab, width), "bfloat16"), ((tokens,), "int32"))
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return compile_report(jax.value_and_grad(loss, (0, 1)), *arguments, chip=chip, depth=depth)


def exact_loss(x_ND: Any, head_VD: Any, targets_N: Any) -> tuple[Any, Any, Any]:
    """Return the mean loss and its gradients for hidden states and head in float64, by NumPy."""
    x_ND, head_VD = np.asarray(x_ND, np.float64), np.asarray(head_VD, np.float64)
    rows, targets_N = np.arange(len(x_ND)), np.asarray(targets_N)
    z_NV = x_ND @ head_VD.T
    lse_N = np.log(np.exp(z_NV).sum(1))
    d_NV = np.exp(z_NV - lse_N[:, None])
    d_NV[rows, targets_N] -= 1
    return (lse_N - z_NV[rows, targets_N]).mean(), d_NV @ head_VD / len(x_ND), d_NV.T @ x_ND / len(x_ND)


def relative_error(actual: Any, exact: Any) -> float:
    """Return the norm of the difference over the norm of the exact array."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact))
