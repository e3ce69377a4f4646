"""A step whose layers are fetched and updated one by one: the numbers of the plain step, whatever waits on the host."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx

import llamem
from llamem import Plan, TrainSettings
from llamem.memory import matmul_flops
from llamem.train.on_host import waits_on_host
from llamem.train.step import abstract_step, first_state, make_train_step

# 96 rows of a table are cut into six pieces; 101 are not cut.
CONFIGS = {
    "untied, 96 rows": models.SMALL.replace(vocab_size=96),
    "tied, 101 rows": models.VARIANTS["qwen3"],
    "experts": models.MOE,
    "no layers": models.VARIANTS["no layers"],
}
SETTINGS = TrainSettings(batch_size=2, seq_len=16, steps=10, learning_rate=1e-3, warmup_steps=1, clip_norm=0.5)
LAYERS, NO_CLIP = {"clip": "layer"}, {"clip_norm": None}
STREAMED: dict[str, Any] = {"weights": "host", "moments": "host", "update": "in_backward", "offload": ("block_in",)}


def run(config, plan, optimizer=None, steps=10, **settings):
    """The state after some steps, and their metrics."""
    settings = TrainSettings(**{**vars(SETTINGS), **settings})
    state = first_state(config, settings, plan, optimizer)
    graphdef = nnx.graphdef(llamem.Llama(config, rngs=nnx.Rngs(0), plan=plan))
    where = jax.tree.map(lambda a: a.sharding, state)
    make = make_train_step(graphdef, settings, optimizer)
    step = jax.jit(make, donate_argnums=0, out_shardings=(where, None))
    metrics = []
    for i in range(steps):
        tokens = models.tokens_of(config, T=17, seed=i)
        state, values = step(state, (tokens[:, :-1], tokens[:, 1:]))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


def distances(one, other):
    """Of every leaf, relative to its size."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    found = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        found[jax.tree_util.keystr(path)] = float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))
    return found


# Every combination of places, moment of the update and clipping that differs in the program.
PLANS = [
    {"weights": weights, "moments": moments, "update": update, "offload": offload}
    for weights, moments, update, offload in itertools.product(
        ("device", "host"), ("device", "host"), ("after", "in_backward"), ((), ("block_in",))
    )
]
CASES = [
    *(("untied, 96 rows", STREAMED, clip) for clip in ({}, LAYERS, NO_CLIP)),
    *(("untied, 96 rows", {**STREAMED, "update": "after"}, clip) for clip in ({}, LAYERS)),
    *(("tied, 101 rows", {**STREAMED, "update": update}, {}) for update in ("after", "in_backward")),
    ("tied, 101 rows", STREAMED, LAYERS),
    ("experts", STREAMED, LAYERS),
    ("no layers", STREAMED, {}),
    ("no layers", {**STREAMED, "update": "after"}, LAYERS),
    ("untied, 96 rows", {**STREAMED, "attention_tiles": 2, "mlp_tiles": 3}, LAYERS),
    ("untied, 96 rows", {"update": "in_backward"}, LAYERS),
    ("tied, 101 rows", {"weights": "host"}, {}),
    ("untied, 96 rows", {"moments": "host"}, LAYERS),
]


@pytest.mark.parametrize(("name", "plan", "settings"), CASES)
def test_parameters_after_ten_steps_are_those_of_the_plain_step(name, plan, settings):
    (plain, expected), (mine, got) = (run(CONFIGS[name], Plan(**p), **settings) for p in ({}, plan))
    far = distances(plain.params, mine.params)
    assert max(far.values()) < 1e-6, far
    assert got == [pytest.approx(row, rel=1e-5) for row in expected]
    assert expected[-1]["loss"] < expected[0]["loss"] + 1 and expected[0]["grad_norm"] > 0.5  # clipped
    for path, leaf in jax.tree.leaves_with_path(mine):
        name = jax.tree_util.keystr(path)
        home = plan.get("moments" if "opt_state" in name else "weights", "device")
        assert (leaf.sharding.memory_kind == "pinned_host") == (home == "host" and waits_on_host(path)), name


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("plan", "clip", "name"), itertools.product(PLANS, ({}, LAYERS, NO_CLIP), ("untied, 96 rows", "tied, 101 rows"))
)
def test_every_combination_gives_the_plain_parameters(plan, clip, name):
    (plain, expected), (mine, got) = (run(CONFIGS[name], Plan(**p), **clip) for p in ({}, plan))
    assert max(distances(plain.params, mine.params).values()) < 1e-6
    assert got == [pytest.approx(row, rel=1e-5) for row in expected]
