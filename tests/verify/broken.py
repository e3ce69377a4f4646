"""Broken training programs: what goes wrong, silently, when layers are checkpointed. Each fails its own way."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from programs import (
    BATCH,
    BROKEN,
    LINEN,
    NOISY,
    NOISY_CASE,
    POLICIES,
    WEIGHTS,
    D,
    L,
    N,
    Program,
    X,
    broken,
    by_policy,
    dropout,
    half,
    in_mode,
    layer,
    linen_transforms,
    normal,
    offloaded,
    scanned,
    split,
    stack,
    stacked,
    standardised,
    unrolled,
    with_keys,
)

import llamem
from jaxmem import Title

# Policies and options.


def unused_name(w: Any, x: Any) -> Any:
    h = x @ w["up"]
    checkpoint_name(h, "h")
    return x + jnp.sin(jnp.tanh(h)) @ w["down"]


@jax.custom_vjp
def named_forward(x: Any) -> Any:
    return checkpoint_name(jnp.tanh(x), "act")


named_forward.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, g: (g * (1 - y**2),))


def named_in_the_primal(w: Any, x: Any) -> Any:
    return x + jnp.sin(named_forward(x @ w["up"])) @ w["down"]


_SAVE = POLICIES.save_only_these_names
for _name, _loss, _cause in (
    ("a misspelled name", by_policy(_SAVE("hh")), "misspelled"),
    ("one of two names wrong", by_policy(_SAVE("h", "mlp")), "misspelled"),
    (
        "misspelled beside a policy",
        by_policy(POLICIES.save_from_both_policies(_SAVE("g"), POLICIES.dots_saveable)),
        "'g'",
    ),
    ("a name nobody uses", by_policy(_SAVE("h"), unused_name), "nobody uses"),
    ("a name in the primal alone", by_policy(_SAVE("act"), named_in_the_primal), "not in its forward rule"),
    ("a tuple as one name", by_policy(_SAVE(("h", "g"))), "as one name"),
    ("a factory for its result", by_policy(_SAVE), "not what it returns"),
    ("the broken exception", by_policy(POLICIES.save_anything_except_these_names("h")), "saves what it should except"),
    ("offload to the device", by_policy(offloaded("device")), "not the host's memory"),
):
    BROKEN[_name] = Program(_loss, WEIGHTS, X, Title.OPTIONS, _cause)


@broken(Title.OPTIONS, "Give the policy to the outer")
def policy_inside_policy(w, x, how):
    inner = jax.checkpoint(layer, policy=_SAVE("h"))
    return scanned(jax.checkpoint(inner) if how else layer, w, x)


@broken(Title.OPTIONS, "outside a loop")
def prevent_cse_outside_a_scan(w, x, how):
    return unrolled(jax.checkpoint(layer, prevent_cse=False) if how else layer, w, x)


@broken(Title.OPTIONS, "that is not unrolled")
def prevent_cse_in_an_unrolled_scan(w, x, how):
    return scanned(jax.checkpoint(layer, prevent_cse=False) if how else layer, w, x, unroll=True)


SEEN = []


@broken(Title.OPTIONS, "counted twice")
def mean_on_the_host(w, x, how):
    def body(w, x):
        jax.debug.callback(SEEN.append, jnp.mean(x))
        return layer(w, x)

    return scanned(jax.checkpoint(body) if how else body, w, x)


@broken(Title.OPTIONS, "static_argnums")
def a_flag_became_an_array(w, x, how):
    def body(w, x, train):
        return layer(w, x) if train else x

    return scanned(lambda w, x: (jax.checkpoint(body) if how else body)(w, x, True), w, x)


# Checkpoints that are not there, do nothing, or stand where they save nothing.


@broken(Title.CHECKPOINTS, "take the gradient inside the loop")
def accumulation_inside(w, x, how):
    if not how:
        return unrolled(layer, w, x)
    parts = x.reshape(4, N // 4, D)
    return jax.lax.scan(lambda total, part: (total + unrolled(layer, w, part) / 4, None), 0.0, parts)[0]


@broken(Title.CHECKPOINTS, "filtered by a caller")
def a_flag_that_is_filtered(w, x, how):
    def model(w, x, **options):
        known = {name: value for name, value in options.items() if name in ("mode",)}  # "remat" does not get through
        return llamem.apply_stack(layer, w, x, **known)

    return jnp.mean(model(w, x, mode="scan", remat=how) ** 2)


@broken(Title.CHECKPOINTS, "whatever the flag says")
def a_flag_that_is_always_on(w, x, how):
    return scanned(jax.checkpoint(layer), w, x)


@broken(Title.CHECKPOINTS, "some of the layers only")
def every_fourth_of_twenty_layers(w, x, how):
    return unrolled([jax.checkpoint(layer) if how and i % 4 == 0 else layer for i in range(20)], w, x, 20)


@broken(Title.CHECKPOINTS, "some of the layers only")
def one_of_two_scans(w, x, how):
    first, rest = (jax.tree.map(lambda leaf, part=part: leaf[part], w) for part in (slice(0, 2), slice(2, L)))
    return stacked(layer, rest, stack(layer, first, x, how), False)


@broken(Title.CHECKPOINTS, "some of the layers only")
def one_half_of_the_layers(w, x, how):
    first, last = (jax.tree.map(lambda leaf, part=part: leaf[part], w) for part in (slice(0, L // 2), slice(L // 2, L)))
    return stacked(layer, last, stack(layer, first, x, how), False)


WIDER = {"up": normal(7, 4, D, 8 * D), "down": normal(8, 4, 8 * D, D)}


@broken(Title.CHECKPOINTS, "some of the layers only", {"first": WEIGHTS, "second": WIDER})
def a_wider_stack_forgotten(w, x, how):
    return stacked(layer, w["second"], stack(layer, w["first"], x, how), False)


BROKEN["saves everything"] = Program(
    by_policy(POLICIES.everything_saveable), WEIGHTS, X, Title.RUNS, "saves everything"
)


@broken(Title.RUNS, "costs nothing")
def only_the_cheap_part(w, x, how):
    def scale(x):
        return 2.0 * x

    return scanned(lambda w, x: layer(w, (jax.checkpoint(scale) if how else scale)(x)), w, x)


@broken(Title.MEMORY, "not where the memory is")
def only_the_norms(w, x, how):
    norm = jax.checkpoint(standardised) if how else standardised
    return scanned(lambda w, x: x + layer(w, norm(x)), w, x)


@broken(Title.MEMORY, "around everything")
def around_everything(w, x, how):
    whole = partial(unrolled, layer)
    return (jax.checkpoint(whole) if how else whole)(w, x)


@broken(Title.MEMORY, "around the loop")
def around_the_scan(w, x, how):
    def encode(w, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

    return jnp.mean(standardised((jax.checkpoint(encode) if how else encode)(w, x)) ** 4)


@broken(Title.MEMORY, "hand out")
def activations_handed_out(w, x, how):
    def body(w, x):
        h = jnp.tanh(x @ w["up"])
        s = jnp.sin(h)
        return x + s @ w["down"], (h, s, jnp.cos(h))

    x, kept = stack(body, w, x, how, has_aux=True)
    return jnp.mean(x**2) + 1e-3 * sum(jnp.mean(a**2) for a in kept)


@broken(Title.MEMORY, "an entry for each turn")
def a_history_in_the_carry(w, x, how):
    """A skip from an earlier layer, by way of all layers' results: each turn's checkpoint keeps them all."""

    def body(carry, inputs):
        x, history = carry
        i, w = inputs
        x = layer(w, x + history[i // 2])
        return (x, history.at[i].set(x)), None

    start = x, jnp.zeros((L, *x.shape))
    return jnp.mean(jax.lax.scan(jax.checkpoint(body) if how else body, start, (jnp.arange(L), w))[0][1] ** 2)


@broken(Title.COMPILER, "merged both computations")
def undone_by_the_compiler(w, x, how):
    return unrolled(
        jax.checkpoint(layer) if how else layer, w, x
    )  # the barrier stands, and the CPU's compiler removes it


# Random numbers that repeat.

for _name, _make, _cause in (
    ("one key broadcast", lambda key: jnp.broadcast_to(key, (L,)), "are copies"),
    ("pairs share keys", lambda key: jnp.repeat(jax.random.split(key, L // 2), 2), "are copies"),
    ("one raw key tiled", lambda key: jnp.tile(jax.random.key_data(key), (L, 1)), "are copies"),
    (
        "folded with half the number",
        lambda key: jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(L) // 2),
        "copies",
    ),
    ("a constant, split", lambda key: split(jax.random.key(0)), "same in every step"),
    (
        "a raw constant, folded",
        lambda key: jax.vmap(partial(jax.random.fold_in, jax.random.PRNGKey(7)))(jnp.arange(L)),
        "same in every step",
    ),
):
    BROKEN[_name] = Program(with_keys(_make), WEIGHTS, BATCH, Title.RANDOMNESS, _cause)
BROKEN["linen, rng not split"] = Program(linen_transforms(False), LINEN, BATCH, Title.RANDOMNESS, "are copies")


@broken(Title.RANDOMNESS, "remainder, as of step % n", batch={"x": X, "step": jnp.int32(13)})
def keys_that_come_again(w, batch, how):
    key = jax.random.fold_in(jax.random.key(11), batch["step"] % 8)
    return stacked(dropout, w, batch["x"], how, split(key))


@broken(Title.RANDOMNESS, "closed over", batch=BATCH)
def one_key_for_all_layers(w, batch, how):
    def body(w, x):
        return dropout(w, x, batch["key"])

    return scanned(jax.checkpoint(body) if how else body, w, batch["x"])


@broken(Title.RANDOMNESS, "6 draws use one key", batch=BATCH)
def one_key_unrolled(w, batch, how):
    return stacked(lambda w, x: dropout(w, x, batch["key"]), w, batch["x"], how, mode="unroll")


@broken(Title.RANDOMNESS, "are copies", batch=BATCH)
def one_key_in_a_branch(w, batch, how):
    def body(w, x, i):
        return jax.lax.cond(i > 0, lambda w, x: dropout(w, x, batch["key"]), layer, w, x)

    return stacked(body, w, batch["x"], how, jnp.arange(L))


@broken(Title.RANDOMNESS, "are copies", batch=BATCH)
def masks_beforehand(w, batch, how):
    """Masks of all layers are drawn at once, with copies of one key."""
    masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (N, D)))(jnp.broadcast_to(batch["key"], (L,)))
    return stacked(lambda w, x, mask: layer(w, x) * mask, w, batch["x"], how, masks)


@broken(Title.RANDOMNESS, "drawn before the loop", batch=BATCH)
def one_mask_for_all(w, batch, how):
    mask = jax.random.bernoulli(batch["key"], 0.8, (N, D)) / 0.8
    return stacked(lambda w, x: layer(w, x) * mask, w, batch["x"], how)


@broken(Title.RANDOMNESS, "are copies", batch=BATCH)
def microbatches_of_one_key(w, batch, how):
    def part(total, x):
        return total + with_keys(split)(w, {**batch, "x": x}, how) / 2, None

    return jax.lax.scan(part, 0.0, batch["x"].reshape(2, N // 2, D))[0]


@broken(Title.RANDOMNESS, "are copies", batch=BATCH)
def one_key_in_a_while_loop(w, batch, how):
    def refine(state):
        return state[0] + 1, state[1] / 2 + jax.random.normal(batch["key"], (N, D))

    noise = jax.lax.while_loop(lambda state: state[0] < 3, refine, (0, jnp.zeros((N, D))))[1]
    return stacked(layer, w, batch["x"] + noise, how)


@broken(Title.RANDOMNESS, "not mapped", batch=BATCH)
def examples_share_a_key(w, batch, how):
    def body(w, x, key):
        return jax.vmap(partial(dropout, w), in_axes=(0, None))(x.reshape(8, N // 8, D), key).reshape(N, D)

    return stacked(body, w, batch["x"], how, split(batch["key"]))


@broken(Title.RANDOMNESS, "draws use one key", batch=BATCH)
def encoder_and_decoder_share_keys(w, batch, how):
    keys = split(batch["key"])
    return stacked(dropout, w, stack(dropout, w, batch["x"], how, keys), how, keys)


COUNTER = itertools.count()


@broken(Title.RANDOMNESS, "while tracing")
def a_stateful_generator(w, x, how):
    def body(w, x):
        return dropout(w, x, jax.random.key(next(COUNTER)))

    return scanned(jax.checkpoint(body) if how else body, w, x)


@broken(Title.RANDOMNESS, "state (of nnx.Dropout", (NOISY_CASE[0], NOISY_CASE[1]["state"]))
def a_counter_that_stays(states, x, how):
    def call(states, x):
        return nnx.merge(NOISY, *jax.tree.map(lambda leaf: leaf, states))(x)

    return scanned(jax.checkpoint(call) if how else call, states, x)


# Parameters.

ALIKE = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], L, axis=0), WEIGHTS)
BROKEN["layers all alike"] = Program(by_policy(None), ALIKE, X, Title.PARAMETERS, 'skip=["parameters are')
BROKEN["layers all alike, nested"] = Program(in_mode("nested"), ALIKE, X, Title.PARAMETERS, "(6 of 6)")
BROKEN["layers all alike, unrolled"] = Program(in_mode("unroll"), ALIKE, X, Title.PARAMETERS, "identical")


@broken(Title.PARAMETERS, "identical", [jax.tree.map(lambda a: a[0], WEIGHTS)] * 4)
def a_list_of_equal_layers(w, x, how):
    return stacked(layer, llamem.stack_layers(w), x, how)


TABLE = normal(3, 50, D)
TIED = {"embedding": TABLE, "head": jnp.array(TABLE), "layers": WEIGHTS}


@broken(Title.PARAMETERS, "half of the gradient", TIED, jnp.arange(40))
def a_tied_weight_split(w, tokens, how):
    x = stack(layer, w["layers"], w["embedding"][tokens], how)
    return jnp.mean(jax.nn.logsumexp(x @ w["head"].T, axis=-1))


# Loss, results, gradients, choices: another computation with rematerialisation than without.


@broken(Title.LOSS, "another computation altogether")
def another_computation(w, x, how):
    return stacked(lambda w, x: layer(w, 0.99 * x if how else x), w, x, how)


@broken(Title.LOSS)
def noise_while_tracing(w, x, how):
    return stacked(layer, w, x + np.random.normal(size=(N, D)).astype(np.float32), how)


@broken(Title.LOSS, "in float32", half(WEIGHTS), half(X))
def microbatches_summed_in_sixteen_bits(w, x, how):
    def part(total, x):
        return total + jnp.mean(stack(layer, w, x, how).astype(total.dtype) ** 2), None

    start = jnp.zeros((), jnp.bfloat16 if how else jnp.float32)
    return jax.lax.scan(part, start, x.reshape(64, N // 64, D))[0].astype(jnp.float32) / 64


@broken(Title.LOSS)
def a_hundredth_more_in_mixed_precision(w, x, how):
    loss = jnp.mean(stack(lambda w, x: layer(half(w), x), w, half(x), how).astype(jnp.float32) ** 2)
    return 1.01 * loss if how else loss


@broken(Title.GRADIENTS, "", half({"layers": WEIGHTS, "head": normal(3, D, 50)}), half(X))
def z_loss_lost_in_sixteen_bits(w, x, how):
    logits = stack(layer, w["layers"], x, how) @ w["head"]
    plain = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(N), jnp.arange(N) % 50])
    return plain if how else plain + 1e-4 * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)


@jax.custom_vjp
def total(x: Any) -> Any:
    return jnp.sum(x**2)


total.defvjp(lambda x: (total(x), x), lambda x, g: (2 * x,))


@broken(Title.GRADIENTS, "without the outer cotangent")
def a_wrong_backward_pass(w, x, how):
    """The eleven-month bug: a hand-written backward pass that forgets the outer cotangent."""
    out = stack(layer, w, x, how)
    return (total(out) if how else jnp.sum(out**2)) / out.size


@broken(Title.GRADIENTS, "stop_gradient")
def a_lost_gradient(w, x, how):
    return stacked(layer, {**w, "up": jax.lax.stop_gradient(w["up"])} if how else w, x, how)


def cut(leaf: Any, where: Any) -> Any:
    return jnp.where(where, jax.lax.stop_gradient(leaf), leaf)


@broken(Title.GRADIENTS, "['up'][3]")
def one_layer_without_a_gradient(w, x, how):
    def body(w, x, i):
        return layer({**w, "up": cut(w["up"], how & (i == 3))}, x)

    return stacked(body, w, x, how, jnp.arange(L))


@broken(Title.GRADIENTS, "['experts'][4, 2]", {"experts": normal(5, L, 4, D, D), **WEIGHTS})
def one_expert_lost(w, x, how):
    def body(w, x, i):
        experts = cut(w["experts"], how & (i == 4) & (jnp.arange(4) == 2)[:, None, None])
        mixed = jnp.einsum("end,ne->nd", jnp.tanh(jnp.einsum("nd,edf->enf", x, experts)), jax.nn.softmax(x[:, :4]))
        return layer(w, x) + mixed

    return stacked(body, w, x, how, jnp.arange(L))


def gated(w: Any, x: Any) -> Any:
    """A layer that begins as the identity: by a gate (ReZero), a norm or an adapter's second factor of zeros."""
    return x + w["gate"] * jnp.sin(jnp.tanh(x @ w["up"])) @ w["down"]


DEAD = {**WEIGHTS, "gate": jnp.zeros((L, D * 4))}


@broken(Title.LOSS, "with all parameters moved", DEAD)
def other_weights_in_layers_that_begin_as_the_identity(w, x, how):
    return stacked(lambda w, x: gated(w | {"up": -3 * w["up"]} if how else w, x), w, x, how)


@broken(Title.GRADIENTS, "with all parameters moved", DEAD)
def gradients_lost_in_layers_that_begin_as_the_identity(w, x, how):
    return stacked(lambda w, x: gated(w | {"down": jax.lax.stop_gradient(w["down"])} if how else w, x), w, x, how)


@broken(Title.RESULTS, "updated twice")
def counted_twice(w, x, how):
    def body(w, x, count):
        return layer(w, x), count + (2 if how else 1)

    x, counts = stack(body, w, x, how, jnp.zeros(L, jnp.int32), has_aux=True)
    return jnp.mean(x**2), counts


@broken(Title.RESULTS, "0 arrays instead of 1")
def hidden_states_gone(w, x, how):
    x, hidden = stack(layer, w, x, how, return_hidden=True)
    return jnp.mean(x**2), {} if how else {"hidden": hidden}


@broken(Title.RESULTS, "lost in the checkpoint", *NOISY_CASE)
def statistics_lost(w, batch, how):
    """The checkpointed function changes a copy of the module."""

    def body(x, inputs):
        own = nnx.merge(NOISY, *inputs)
        copied = jax.checkpoint(lambda inputs, x: nnx.merge(NOISY, *inputs)(x))
        return copied(inputs, x) if how else own(x), nnx.state(own, nnx.BatchStat)

    x, statistics = jax.lax.scan(body, batch["x"], (w, batch["state"]))
    return jnp.mean(x**2), statistics


@broken(Title.CHOICES, "asks the host")
def other_experts(w, x, how):
    """Experts are chosen after noise that the host draws anew, each time that it is asked."""
    shape = jax.ShapeDtypeStruct((N, 4), jnp.float32)

    def body(w, x):
        noise = jax.pure_callback(lambda: np.random.normal(size=(N, 4)).astype(np.float32), shape)
        expert = jax.lax.top_k(x[:, :4] + noise, 1)[1]
        return layer(w, x * (1.0 + expert))

    return scanned(jax.checkpoint(body) if how else body, w, x)


def always_checkpointed(w: Any, x: Any, how: Any) -> Any:
    """What a model returns at evaluation; this one forgot to look at its mode."""
    return stack(layer, w, x, how)


broken(Title.EVALUATION, "whatever the mode", evaluate=always_checkpointed)(by_policy(None))
BROKEN["evaluation that is rematerialised"] = BROKEN.pop("loss")
