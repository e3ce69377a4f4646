"""Many adapters trained in one batch: as each of them alone, and those that are absent not at all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import MIXED, adapters_of
from flax import nnx
from jax.flatten_util import ravel_pytree
from models import SMALL, model_of, tokens_of
from norms import errors_by_name

from jaxmem import compile_report
from jaxmem.compiling import matmul_flops
from llamem import Adapters, Llama, LoraConfig, Plan, TrainSettings, abstract_lora_step
from llamem.adapters import IN_LAYERS, TARGET_MODULES, init_lora_state, make_lora_step
from llamem.adapters.lora_step import losses_and_grads
from llamem.runs import place_of
from llamem.train.place import ONE_DEVICE

CONFIG = SMALL.replace(n_layers=1)
SETTINGS = TrainSettings(steps=9, batch_size=4, seq_len=8, learning_rate=1e-2, warmup_steps=2, clip_norm=0.5)
RATE = dataclasses.replace(SETTINGS, learning_rate=1e-3)


def stepper(model, settings=SETTINGS):
    base = nnx.state(model)
    step = jax.jit(make_lora_step(model.config, settings, place_of(model.plan)))
    return lambda state, tokens, ids, targets=None: step(
        state, base, (tokens[:, :-1], tokens[:, 1:] if targets is None else targets, jnp.asarray(ids))
    )


def mixed(count):
    """Adapters of three ranks."""
    ranks = tuple(3 + 2 * (i % 3) for i in range(count))
    return LoraConfig(ranks=ranks, target_modules=("q", "o", "down", "head"))


def steps_of(count, n_steps, seed=0):
    """Batches in which every adapter has one sequence and every other one two, in another order each time."""
    rng = np.random.default_rng(seed)
    for i in range(n_steps):
        ids = rng.permutation(np.concatenate([np.arange(count), np.arange(1, count, 2)]))
        yield tokens_of(CONFIG, T=9, B=len(ids), seed=10 + i), ids


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.weekly)])
def test_together_as_one_by_one(count):
    """Adapters of three ranks, three steps; trained together, and each of them alone on its own sequences."""
    step, adapters = stepper(model_of(CONFIG), RATE), adapters_of(CONFIG, mixed(count))
    state = init_lora_state(adapters, RATE)
    alone = {i: init_lora_state(adapters.select([i]), RATE) for i in sorted({0, 1 % count, 5 % count, count - 1})}
    for tokens, ids in steps_of(count, 3):
        state, metrics = step(state, tokens, ids)
        for i in alone:
            mine = tokens[ids == i]
            alone[i], own = step(alone[i], mine, np.zeros(len(mine), int))
            for name in ("loss", "grad_norm"):
                np.testing.assert_allclose(metrics[name][i], own[name][0], rtol=1e-5)
    for i, one in alone.items():
        together = state.params.select([i])
        numbers, expected = (np.asarray(ravel_pytree(s.weights)[0], np.float64) for s in (together, one.params))
        assert np.linalg.norm(numbers - expected) < 3e-6 * np.linalg.norm(expected)  # measured: 1.1e-6
        # AdamW divides by the gradient's own size: a gradient that is nearly 0 moves its number by its rounding. In a
        # small array one such number shows.
        differences = list(errors_by_name(together.weights, one.params.weights).values())
        assert np.median(differences) < 1e-6 and max(differences) < 5e-6
        assert one.step == 3 == state.step[i]


def test_an_absent_adapter_keeps_every_bit_and_the_base_is_never_touched():
    step = stepper(model_of(CONFIG))
    state = init_lora_state(adapters_of(CONFIG), SETTINGS)
    tokens = tokens_of(CONFIG, T=9, B=4)
    state, _ = step(state, tokens, [0, 1, 2, 0])
    ignored = tokens[:, 1:].at[3].set(-100)  # no target of it counts: as if it were not there
    after, metrics = step(state, tokens, [0, 0, 0, 2], ignored)
    for i, moved in enumerate([True, False, False]):
        before_i, after_i = state.params.select([i]), after.params.select([i])
        same = [
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(before_i.weights), jax.tree.leaves(after_i.weights), strict=True)
        ]
        assert not any(same) if moved else all(same)
    np.testing.assert_array_equal(after.step, [2, 1, 1])
    np.testing.assert_array_equal(metrics["tokens"], [24, 0, 0])
    np.testing.assert_array_equal(np.isnan(metrics["loss"]), [False, True, True])
    leaves = zip(jax.tree.leaves_with_path(state.opt_state), jax.tree.leaves(after.opt_state), strict=True)
    for (path, old), new in leaves:
        axis = int(any(getattr(entry, "key", None) in IN_LAYERS for entry in path))
        old, new = np.moveaxis(old, axis, 0), np.moveaxis(new, axis, 0)
        np.testing.assert_array_equal(old[1:], new[1:])
        assert not np.array_equal(old[0], new[0]), path


def test_padding_beyond_an_adapter_s_rank_stays_zero():
    state = init_lora_state(Adapters.create(CONFIG, MIXED, rngs=nnx.Rngs(1)), SETTINGS)
    step = stepper(model_of(CONFIG))
    for tokens, ids in steps_of(3, 4):
        state, _ = step(state, tokens, ids)
    for name, part in state.params.weights.items():
        for target, array in part.items():
            beyond = np.arange(5)[:, None] >= np.asarray(state.params.rank[target])[..., None, None]
            assert np.all(np.where(beyond, array, 0) == 0), (name, target)
            assert np.all(np.any(array != 0, axis=-1) == ~beyond[..., 0]), (name, target)


def test_each_adapter_has_its_own_warm_up_and_count():
    """One that joins later begins its warm-up then."""
    step, start = stepper(model_of(CONFIG)), init_lora_state(adapters_of(CONFIG), SETTINGS)
    tokens = tokens_of(CONFIG, T=9, B=4)
    late, _ = step(step(start, tokens, [0, 0, 0, 0])[0], tokens, [0, 1, 1, 2])
    first, _ = step(start, tokens, [0, 1, 1, 2])
    for i in (1, 2):
        jax.tree.map(np.testing.assert_array_equal, late.params.select([i]), first.params.select([i]))
    np.testing.assert_array_equal(late.step, [2, 1, 1])


def test_the_cost_of_64_adapters_is_that_of_one():
    """Products of a whole step. Those of the adapted head grow with the adapters' columns; all others are the same."""
    B, config = 64, CONFIG.replace(d_model=256, d_ff=512, vocab_size=997)
    settings = TrainSettings(batch_size=B, seq_len=16)

    def products(count, targets):
        lora = LoraConfig(ranks=(4,) * count, target_modules=targets)
        step, *shapes = abstract_lora_step(config, settings, Plan(loss_tiles=2, loss_axis="tokens"), lora)
        return matmul_flops(jax.make_jaxpr(step)(*shapes).jaxpr)

    without_head = tuple(t for t in TARGET_MODULES if t != "head")
    assert products(64, without_head) == products(1, without_head)
    head = products(64, TARGET_MODULES) - products(1, TARGET_MODULES)
    assert head == 3 * 2 * B * 16 * (64 - 1) * 4 * 997


def test_the_abstract_step_is_the_step_and_compiles():
    step, *shapes = abstract_lora_step(CONFIG, SETTINGS, Plan(), MIXED)
    state = init_lora_state(adapters_of(CONFIG), SETTINGS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes[0])
    params = 3 * sum(leaf.size for leaf in jax.tree.leaves(state.params.weights))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes[0])) < params + 200, "adapters and their moments alone"
    report = compile_report(step, *shapes, donate_argnums=(0,), chip="cpu")
    assert report.alias_bytes >= 4 * params


def test_gradients_in_16_bits_are_as_good_as_their_numbers():
    """Over 4,096 tokens, each of which has a 4,096th of the mean: in float16 that must not be lost on the way back."""
    B, T = 4, 1024

    config = SMALL.replace(vocab_size=500, d_model=64, n_layers=2, n_heads=4, head_dim=16, d_ff=128, max_seq_len=T)
    exact = nnx.state(Llama(config, rngs=nnx.Rngs(0)))
    adapters, tokens = adapters_of(config, LoraConfig(ranks=(4,)), size=0.01), tokens_of(config, T=T + 1, B=B)
    batch = tokens[:, :-1], tokens[:, 1:], jnp.zeros(B, jnp.int32)

    def gradients(dtype):
        of_type = config.replace(param_dtype=dtype, compute_dtype=dtype)
        graphdef, state = nnx.split(Llama(of_type, rngs=nnx.Rngs(0)))
        state = jax.tree.map(lambda mine, same: same.astype(mine.dtype), state, exact)
        settings = TrainSettings(batch_size=B, seq_len=T)
        return jax.jit(lambda base: losses_and_grads(ONE_DEVICE, graphdef, settings, base, adapters, batch))(state)[1]

    wanted = gradients("float32")
    for dtype, most in (("bfloat16", 0.04), ("float16", 0.01)):
        found = gradients(dtype)
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(found))
        assert max(errors_by_name(found, wanted).values()) < most, dtype
