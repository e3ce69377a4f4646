"""Small broken training programs: what goes wrong, silently, when layers are checkpointed. Each fails its own way."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from programs import KEYS, WEIGHTS, D, L, N, Row, X, by_policy, dropout, layer, scanned, unrolled

import llamem
from llamem.verify import Title


def around_everything(w: Any, x: Any, how: Any) -> Any:
    whole = partial(unrolled, layer)
    return (jax.checkpoint(whole) if how else whole)(w, x)


def around_the_scan(w: Any, x: Any, how: Any) -> Any:
    whole = partial(scanned, layer)
    return (jax.checkpoint(whole) if how else whole)(w, x)


def cse_outside_a_scan(w: Any, x: Any, how: Any) -> Any:
    return unrolled(jax.checkpoint(layer, prevent_cse=False) if how else layer, w, x)


def undone_by_the_compiler(w: Any, x: Any, how: Any) -> Any:
    # The barrier stands, and the CPU's compiler removes it.
    return unrolled(jax.checkpoint(layer) if how else layer, w, x)


def one_key_for_all_layers(w: Any, batch: Any, how: Any) -> Any:
    def body(w, x):
        return dropout(w, x, batch["key"])

    return scanned(jax.checkpoint(body) if how else body, w, batch["x"])


def one_key_unrolled(w: Any, batch: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return dropout(w, x, batch["key"])

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], mode="unroll", remat="nothing" if how else None) ** 2)


COUNTER = itertools.count()


def stateful_draws(w: Any, x: Any, how: Any) -> Any:
    def body(w, x):
        return dropout(w, x, jax.random.key(next(COUNTER)))

    return scanned(jax.checkpoint(body) if how else body, w, x)


def policy_inside_policy(w: Any, x: Any, how: Any) -> Any:
    inner = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("h"))
    return scanned(jax.checkpoint(inner) if how else layer, w, x)


def unused_name(w: Any, x: Any) -> Any:
    h = x @ w["up"]
    checkpoint_name(h, "h")
    return x + jnp.sin(jnp.tanh(h)) @ w["down"]


def flag_as_argument(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any, train: Any) -> Any:
        return layer(w, x) if train else x

    return scanned(lambda w, x: (jax.checkpoint(body) if how else body)(w, x, True), w, x)


def identical_layers() -> Any:
    def make(_: Any) -> Any:
        return {name: jax.random.normal(nnx.Rngs(0).params(), leaf.shape[1:]) / 8 for name, leaf in WEIGHTS.items()}

    return jax.vmap(make)(jnp.arange(L))


TABLE = jax.random.normal(KEYS[3], (50, D))


def split_tie(w: Any, tokens: Any, how: Any) -> Any:
    x = w["embedding"][tokens]
    x = llamem.apply_stack(layer, w["layers"], x, remat="nothing" if how else None)
    return jnp.mean(jax.nn.logsumexp(x @ w["head"].T, axis=-1))


def accumulation_inside(w: Any, x: Any, how: Any) -> Any:
    if not how:
        return unrolled(layer, w, x)
    parts = x.reshape(4, N // 4, D)
    return jax.lax.scan(lambda total, part: (total + unrolled(layer, w, part) / 4, None), 0.0, parts)[0]


def filtered_flag(w: Any, x: Any, how: Any) -> Any:
    def model(w: Any, x: Any, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name in ("mode",)}  # "remat" does not get through
        return llamem.apply_stack(layer, w, x, **known)

    return jnp.mean(model(w, x, mode="scan", remat=how) ** 2)


def wrong_backward(w: Any, x: Any, how: Any) -> Any:
    """The eleven-month bug: a hand-written backward pass that forgets the outer cotangent for one of its arguments."""

    @jax.custom_vjp
    def total(x: Any) -> Any:
        return jnp.sum(x**2)

    total.defvjp(lambda x: (total(x), x), lambda x, g: (2 * x,))
    out = llamem.apply_stack(layer, w, x, remat="nothing" if how else None)
    return (total(out) if how else jnp.sum(out**2)) / out.size


def lost_gradient(w: Any, x: Any, how: Any) -> Any:
    stopped = {**w, "up": jax.lax.stop_gradient(w["up"])} if how else w
    return jnp.mean(llamem.apply_stack(layer, stopped, x, remat="nothing" if how else None) ** 2)


def other_computation(w: Any, x: Any, how: Any) -> Any:
    return scanned(jax.checkpoint(lambda w, x: layer(w, 0.99 * x)) if how else layer, w, x)


def one_layer_stopped(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any, i: Any) -> Any:
        return layer({**w, "up": jnp.where(i == 3, jax.lax.stop_gradient(w["up"]), w["up"])} if how else w, x)

    return jnp.mean(llamem.apply_stack(body, w, x, jnp.arange(L), remat="nothing" if how else None) ** 2)


SEEN = []


def mean_on_the_host(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        jax.debug.callback(SEEN.append, jnp.mean(x))
        return layer(w, x)

    return scanned(jax.checkpoint(body) if how else body, w, x)


class Normed(nnx.Module):
    """A layer with batch statistics, which its call changes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + jnp.sin(jnp.tanh(self.norm(self.linear(x))))


NORMED = nnx.graphdef(Normed(nnx.Rngs(0)))
NORMED_STATE = jax.vmap(lambda key: nnx.state(Normed(nnx.Rngs(key))))(KEYS[:L])
WEIGHTS_OF, STATISTICS_OF = nnx.split_state(NORMED_STATE, nnx.Param, nnx.BatchStat)


def normed(w: Any, batch: Any, how: Any) -> Any:
    """Right: the layer returns its new statistics."""

    def body(w: Any, x: Any, statistics: Any) -> Any:
        own = nnx.merge(NORMED, w, statistics)
        return own(x), nnx.state(own, nnx.BatchStat)

    remat = "nothing" if how else None
    x, statistics = llamem.apply_stack(body, w, batch["x"], batch["statistics"], remat=remat, has_aux=True)
    return jnp.mean(x**2), statistics


def statistics_lost(w: Any, batch: Any, how: Any) -> Any:
    """Wrong: the checkpointed function changes a copy of the module."""

    def body(x: Any, inputs: Any) -> Any:
        own = nnx.merge(NORMED, *inputs)
        copied = jax.checkpoint(lambda inputs, x: nnx.merge(NORMED, *inputs)(x))
        return copied(inputs, x) if how else own(x), nnx.state(own, nnx.BatchStat)

    x, statistics = jax.lax.scan(body, batch["x"], (w, batch["statistics"]))
    return jnp.mean(x**2), statistics


def jittered_router(w: Any, x: Any, how: Any) -> Any:
    """Experts are chosen after noise that the host draws anew, each time that it is asked."""

    def body(w: Any, x: Any) -> Any:
        noise = jax.pure_callback(lambda: np.random.normal(size=(N, 4)).astype(np.float32), NOISE)
        expert = jax.lax.top_k(x[:, :4] + noise, 1)[1]
        return layer(w, x * (1.0 + expert))

    return scanned(jax.checkpoint(body) if how else body, w, x)


NOISE = jax.ShapeDtypeStruct((N, 4), jnp.float32)


def always_checkpointed(w: Any, x: Any, how: Any) -> Any:
    """What a model returns at evaluation; this one forgot to look at its mode."""
    return llamem.apply_stack(layer, w, x, remat="nothing" if how else None)


_POLICIES = jax.checkpoint_policies
_DEVICE = _POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="device"
)
_DROPOUT = {"x": X, "key": KEYS[4]}
_TIED = {"embedding": TABLE, "head": jnp.array(TABLE), "layers": WEIGHTS}
GALLERY = {
    "a misspelled name": Row(by_policy(_POLICIES.save_only_these_names("hh")), "misspelled"),
    "a name nobody uses": Row(by_policy(_POLICIES.save_only_these_names("h"), unused_name), "nobody uses"),
    "a factory for its result": Row(by_policy(_POLICIES.save_only_these_names), "not what it returns"),
    "the broken exception": Row(
        by_policy(_POLICIES.save_anything_except_these_names("h")), "saves what it should except"
    ),
    "offload to the device": Row(by_policy(_DEVICE), "not the host's memory"),
    "a policy that saves everything": Row(by_policy(_POLICIES.everything_saveable), "saves everything", Title.RUNS),
    "policy inside policy": Row(policy_inside_policy, "Give the policy to the outer"),
    "around the whole loss": Row(around_everything, "around everything", Title.MEMORY),
    "around the scan": Row(around_the_scan, "around the loop", Title.MEMORY),
    "prevent_cse=False outside a scan": Row(cse_outside_a_scan, "outside a loop"),
    "the compiler undid it": Row(undone_by_the_compiler, "merged both computations", Title.COMPILER),
    "one key closed over by a scan": Row(one_key_for_all_layers, "closed over", Title.RANDOMNESS, batch=_DROPOUT),
    "one key for unrolled layers": Row(one_key_unrolled, "use one key", Title.RANDOMNESS, batch=_DROPOUT),
    "a stateful generator": Row(stateful_draws, "while tracing", Title.RANDOMNESS),
    "a flag became an array": Row(flag_as_argument, "static_argnums"),
    "identical layers": Row(by_policy(None), "identical", Title.PARAMETERS, params=identical_layers()),
    "a tied weight split": Row(split_tie, "half of the gradient", Title.PARAMETERS, _TIED, jnp.arange(40)),
    "accumulation inside the gradient": Row(
        accumulation_inside, "take the gradient inside the loop", Title.CHECKPOINTS
    ),
    "a flag that is filtered": Row(filtered_flag, "filtered by a caller", Title.CHECKPOINTS),
    "a flag that is always on": Row(
        lambda w, x, how: scanned(jax.checkpoint(layer), w, x), "whatever the flag says", Title.CHECKPOINTS
    ),
    "a wrong backward pass": Row(wrong_backward, "without the outer cotangent", Title.GRADIENTS),
    "a lost gradient": Row(lost_gradient, "stop_gradient", Title.GRADIENTS),
    "one layer without a gradient": Row(one_layer_stopped, "['up'][3]", Title.GRADIENTS),
    "statistics updated twice": Row(mean_on_the_host, "counted twice"),
    "statistics lost": Row(
        statistics_lost,
        "lost in the checkpoint",
        Title.RESULTS,
        WEIGHTS_OF,
        {"x": X, "statistics": STATISTICS_OF},
    ),
    "other experts": Row(jittered_router, "asks the host", Title.CHOICES),
    "evaluation that is rematerialised": Row(
        by_policy(None), "whatever the mode", Title.EVALUATION, evaluate=always_checkpointed
    ),
    "another computation": Row(other_computation, "another computation altogether", Title.LOSS),
}
