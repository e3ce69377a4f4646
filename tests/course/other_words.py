"""Right answers that are written otherwise than the solutions: each check takes them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import llamem
from llamem_course.exercises import (
    n00_where_the_memory_goes,
    n01_checkpoint_basics,
    n02_checkpoint_policies,
    n03_scan_vs_unrolled,
    n04_vocabulary_tiling,
    n05_vocabulary_tiling_on_a_mesh,
    n06_llama3,
    n07_train_llama3,
    n08_long_context,
    n09_adapters,
    n10_trust_but_verify,
    n11_scale_out,
    n12_larger_than_the_chip,
    n13_rewards_and_preferences,
)


def every_step(schedule):
    held = np.zeros(1 + max(last for _, last, _ in schedule), int)
    for first, last, size in schedule:
        held[first : last + 1] += size
    return held.max(), held.argmax()


def by_operation(*sizes):
    rows = n00_where_the_memory_goes.check_step_schedule.right(*sizes)
    operations = range(2 * len(sizes[0]) + sizes[3] + 1)
    return [(at, at, sum(size for first, last, size in rows if first <= at <= last)) for at in operations]


def with_last_output(config, batch_size, seq_len, parts):
    tokens = batch_size * seq_len // parts
    named = 3 * config.param_dtype.itemsize + 4 * (parts > 1)
    inputs = (config.n_layers + 1) * config.compute_dtype.itemsize * config.d_model
    return named * config.n_params + tokens * (inputs + 8 * config.vocab_size)


def by_autodiff(z_NU, words_U, lse_N, y_N, c):
    elsewhere_N = 1 - jnp.exp(z_NU - lse_N[:, None]).sum(1)
    others_N = lse_N + jnp.log(jnp.maximum(elsewhere_N, 0))  # all words outside of the tile as one logit

    def losses(z_NU):
        lse_N = jax.nn.logsumexp(jnp.concatenate([z_NU, others_N[:, None]], axis=1), axis=1)
        own_N = jnp.sum(z_NU * (y_N[:, None] == words_U), axis=1)
        return jnp.sum(lse_N - own_N + c * lse_N**2)

    return jax.grad(losses)(z_NU)


def of_x_alone(sweep):
    def loss_of_x(x, head, targets):
        @jax.custom_vjp
        def loss(x):
            return sweep(x, head, targets)[0]

        def forward(x):
            value, dx = sweep(x, head, targets)
            return value, dx.astype(x.dtype)

        loss.defvjp(forward, lambda dx, g: ((g * dx).astype(dx.dtype),))
        return loss(x)

    return loss_of_x


def loop(layer, w, x):
    for one in w:
        x = layer(one, x)
    return x


def by_hand(layer):
    once = jax.custom_vjp(layer)
    once.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, g: jax.vjp(layer, *kept)[1](g))
    return once


def nested(layer, w, x, size):
    def scan(layer, w, x):
        return jax.lax.scan(lambda x, one: (layer(one, x), None), x, w)[0]

    group = jax.checkpoint(lambda w, x: scan(jax.checkpoint(layer, prevent_cse=False), w, x), prevent_cse=False)
    return scan(group, w.reshape(-1, size, *w.shape[1:]), x)


def last_of_a_group_free(layer, w, x, size):
    def group(w, x):
        return layer(w[-1], loop(jax.checkpoint(layer), w[:-1], x))

    for start in range(0, len(w), size):
        x = jax.checkpoint(group)(w[start : start + size], x)
    return x


def halves(w1, w2, w3, x):
    narrow = jax.checkpoint(lambda w1, w2, x: jnp.tanh(x @ w1) @ w2)(w1, w2, x)
    return jax.checkpoint(lambda narrow, w3: jnp.sin(narrow) @ w3)(narrow, w3)


def with_logsumexp(config, tokens, names):
    extra = 4 * config.n_layers * tokens * config.n_heads * ("attn" in names)
    return n02_checkpoint_policies.check_residual_bytes.right(config, tokens, names) + extra


def runs_by_hand(layer, layers, x):
    """Find the runs by recursion, apply a layer alone without a scan, and loop by an index."""
    if not layers:
        return x
    shapes = [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), w) for w in layers]
    n = next((i for i, one in enumerate(shapes) if one != shapes[0]), len(layers))
    w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[:n])
    turn = lambda i, x: jax.checkpoint(layer)(jax.tree.map(lambda leaf: leaf[i], w), x)  # noqa: E731
    x = jax.checkpoint(layer)(layers[0], x) if n == 1 else jax.lax.fori_loop(0, n, turn, x)
    return runs_by_hand(layer, layers[n:], x)


def shuffled(seed, epoch, count):
    return np.random.RandomState([seed, epoch]).permutation(count)


def by_jax_keys(step, seed, count, size):
    numbers = range(step * size, step * size + size)
    epochs = {number // count for number in numbers}
    keys = {epoch: jax.random.fold_in(jax.random.key(seed), epoch) for epoch in epochs}
    orders = {epoch: jax.random.permutation(key, count) for epoch, key in keys.items()}
    return jnp.stack([orders[number // count][number % count] for number in numbers])


def whole_epochs(step, seed, count, size):
    epochs = range(step * size // count, (step * size + size - 1) // count + 1)
    numbers = np.concatenate([shuffled(seed, epoch, count) for epoch in epochs])
    return numbers[step * size - count * epochs[0] :][:size]


def as_lists(ids, wrote):
    return [int(i) for i in ids[:-1]], [int(i) if own else -100 for i, own in zip(ids[1:], wrote[1:], strict=True)]


def into_one_array(w, x_ND, tiles):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    rows = x_ND.reshape(tiles, -1, x_ND.shape[1])

    @jax.checkpoint
    def tile(x_TD):
        gate, up, down = (wide[name].astype(x_TD.dtype) for name in ("gate", "up", "down"))
        return (jax.nn.silu(x_TD @ gate) * (x_TD @ up)) @ down

    return jax.lax.fori_loop(0, tiles, lambda i, y: y.at[i].set(tile(rows[i])), rows).reshape(x_ND.shape)


def by_groups(x, w, down, up, scale, adapter):
    order = jnp.argsort(adapter)
    sizes = jnp.bincount(adapter, length=len(scale)) * x.shape[1]
    z = jax.lax.ragged_dot(x[order].reshape(-1, x.shape[2]), down, sizes)
    delta = jax.lax.ragged_dot(z, up, sizes).reshape(*x.shape[:2], -1) * scale[adapter[order]][:, None, None]
    return x @ w + jnp.zeros_like(delta).at[order].set(delta)


def side_by_side(x, w, down, up, scale, adapter):
    return jax.vmap(lambda x_TD, a: x_TD @ w + scale[a] * (x_TD @ down[a]) @ up[a])(x, adapter)


def unpacked(values, scale, dtype):
    q = jnp.concatenate([values & 15, values >> 4], axis=-1).astype(jnp.float32) - 8
    return (q * scale.astype(jnp.float32)[..., None]).reshape(len(values), -1).astype(dtype)


def row_by_row(values, scale, dtype):
    return jax.lax.map(lambda one: unpacked(one[0][None], one[1][None], dtype)[0], (values, scale))


def in_a_fori_loop(layer, update, state, inputs, dy):
    def visit(turn, carry):
        dx, state = carry
        i = len(inputs) - 1 - turn
        one = jax.tree.map(lambda a: a[i], state)
        grads, dx = jax.jit(lambda w, x, dx: jax.vjp(layer, w, x)[1](dx))(one["w"], inputs[i], dx)
        new = jax.lax.cond(i >= 0, update, lambda one, _: one, one, grads)
        return dx, jax.tree.map(lambda a, b: a.at[i].set(b), state, new)

    return jax.lax.fori_loop(0, len(inputs), visit, (dy, state))


def by_parts(x, head, drawn, a, old, mask, epsilon):
    logp = jax.lax.map(jax.checkpoint(lambda one: llamem.tiled_logprobs(one[0], head, one[1])), (x, drawn))
    ratio = jnp.prod(jnp.exp(mask / mask.sum(axis=1, keepdims=True) * (logp - old)), axis=1)
    return -jnp.where(a > 0, jnp.minimum(ratio, 1 + epsilon) * a, jnp.maximum(ratio, 1 - epsilon) * a).mean()


def zero_for_no_number(rewards):
    """A row less its first reward has the same advantages, and of equals the zeros are exact."""
    rewards = rewards - rewards[:, :1]
    above = rewards - rewards.mean(1, keepdims=True)
    return jnp.nan_to_num(above / rewards.std(1, ddof=1, keepdims=True))


def key_in_the_carry(layer, w, x, key, remat):
    def body(both, w):
        x, key = both
        key, own = jax.random.split(key)
        return (layer(w, x, own), key), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(body) if remat else body, (x, key), w)[0][0] ** 2)


def counted(layer, w, x, key, remat):
    body, keys = jax.checkpoint(layer) if remat else layer, jax.random.split(key, len(w["up"]))
    turn = lambda i, x: body(jax.tree.map(lambda a: a[i], w), x, keys[i])  # noqa: E731
    return jnp.mean(jax.lax.fori_loop(0, len(keys), turn, x) ** 2)


def by_jax_itself(loss, w, x):
    needs = []
    for remat in (True, False):
        both = jax.jit(jax.value_and_grad(lambda w, x, remat=remat: loss(w, x, remat)))
        analysis = both.lower(w, x).compile().memory_analysis()
        assert analysis
        needs.append(analysis.temp_size_in_bytes)
    return needs[0] / needs[1] <= 0.9


def logits_added_in_shares(x, w, ids, axis):
    own = ids - jax.lax.axis_index(axis) * len(w)
    found = jnp.einsum("nd,nd->n", x, w[own % len(w)])
    found = jnp.where((own >= 0) & (own < len(w)), found, 0)
    return jax.lax.all_gather(jax.lax.psum_scatter(found, axis, tiled=True), axis, tiled=True)


def added_in_shares(m, s, mix, axis):
    def summed(a):
        return jax.lax.all_gather(jax.lax.psum_scatter(a, axis, tiled=True), axis, tiled=True)

    top = jax.lax.pmax(m, axis)
    s, mix = summed(s * jnp.exp(m - top)), summed(mix * jnp.exp(m - top)[:, None])
    return [top + jnp.log(s), mix / s[:, None]]


def sums_gathered(losses, counts, axis):
    return jax.lax.all_gather(losses.sum(where=counts), axis).sum() / jax.lax.psum(counts.sum(), axis)


def in_two_tiles(x, head, drawn, advantages, old, mask, epsilon):
    logp = llamem.tiled_logprobs(x, head, drawn, num_tiles=2)
    ratio = jnp.exp(jnp.sum(mask * (logp - old), axis=1) / jnp.sum(mask, axis=1))
    return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages))


OTHER_WORDS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (n00_where_the_memory_goes.check_peak_and_operation, every_step),
    (n00_where_the_memory_goes.check_peak_and_operation, lambda s: np.array(every_step(s))),
    (n00_where_the_memory_goes.check_peak_in_parts, with_last_output),
    (n00_where_the_memory_goes.check_step_schedule, by_operation),
    (
        n00_where_the_memory_goes.check_step_schedule,
        lambda *sizes: np.array(n00_where_the_memory_goes.check_step_schedule.right(*sizes))[::-1],
    ),
    (n01_checkpoint_basics.check_rematerialised_stack, lambda layer, w, x: loop(by_hand(layer), w, x)),
    (
        n01_checkpoint_basics.check_rematerialised_stack,
        lambda layer, w, x: llamem.apply_stack(layer, w, x, mode="unroll", remat="nothing"),
    ),
    (
        n01_checkpoint_basics.check_rematerialised_stack,
        lambda layer, w, x: layer(w[-1], loop(jax.checkpoint(layer), w[:-1], x)),
    ),
    (n01_checkpoint_basics.check_grouped_stack, nested),
    (n01_checkpoint_basics.check_grouped_stack, last_of_a_group_free),
    (n02_checkpoint_policies.check_residual_bytes, with_logsumexp),
    (n02_checkpoint_policies.check_thrifty, halves),
    (
        n03_scan_vs_unrolled.check_best_groups,
        lambda n, x, w: jnp.array(n03_scan_vs_unrolled.check_best_groups.right(n, x, w)),
    ),
    (n03_scan_vs_unrolled.check_scan_runs, runs_by_hand),
    (
        n03_scan_vs_unrolled.check_scan_runs,
        functools.partial(n03_scan_vs_unrolled._runs, run=functools.partial(n03_scan_vs_unrolled._scan, unroll=2)),
    ),
    (n04_vocabulary_tiling.check_crossing, lambda d, v, n: jnp.array(2 * d * n / (n - 2))),
    (n04_vocabulary_tiling.check_tile_gradient, by_autodiff),
    (n04_vocabulary_tiling.check_frozen_loss, of_x_alone),
    (n08_long_context.check_better_plan, lambda: llamem.Plan(moments="host")),
    (n08_long_context.check_better_plan, lambda: llamem.Plan(offload=("block_in", "attn_out"))),
    (n08_long_context.check_feed_forward, into_one_array),
    (n09_adapters.check_adapted, by_groups),
    (n09_adapters.check_adapted, side_by_side),
    (n09_adapters.check_dequantized, row_by_row),
    (n06_llama3.check_weights_of_a_block, lambda D, H, K, h, F: jnp.asarray(D * (2 + 2 * h * (H + K) + 3 * F))),
    (n07_train_llama3.check_inputs_and_targets, as_lists),
    (n07_train_llama3.check_order, by_jax_keys),
    (n07_train_llama3.check_order, whole_epochs),
    (n12_larger_than_the_chip.check_backward_scan, in_a_fori_loop),
    (n13_rewards_and_preferences.check_advantages_of, zero_for_no_number),
    (n13_rewards_and_preferences.check_sequence_policy_loss, by_parts),
    (n13_rewards_and_preferences.check_sequence_policy_loss, in_two_tiles),
    (n10_trust_but_verify.check_cured_dropout, key_in_the_carry),
    (n10_trust_but_verify.check_cured_dropout, counted),
    (n10_trust_but_verify.check_worth_it, by_jax_itself),
    (n11_scale_out.check_tokens_at_par, lambda flops, link, n, remat: -(-3 * n / link * flops // (8 if remat else 6))),
    (n05_vocabulary_tiling_on_a_mesh.check_mean_over_devices, sums_gathered),
    (n05_vocabulary_tiling_on_a_mesh.check_target_logit, logits_added_in_shares),
    (n05_vocabulary_tiling_on_a_mesh.check_merge_devices, added_in_shares),
]
