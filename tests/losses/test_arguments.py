"""What the losses refuse, and what they say: each mistake by name, and wrong arguments of all sorts."""

import re
from typing import Any

import fuzz
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamem.losses.choice import choose_tiles
from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs

N, D, V = 53, 16, 300
KEYS = jax.random.split(jax.random.key(0), 3)
HIDDEN, HEAD = jax.random.normal(KEYS[0], (N, D)), jax.random.normal(KEYS[1], (V, D))
TARGETS = jax.random.randint(KEYS[2], (N,), 0, V)
pytestmark = pytest.mark.usefixtures("as_a_user")

BAD: list[tuple[dict[str, Any], str]] = [
    ({"head": HEAD.T}, r"head must be \[V, D\] with D = 16, got \(16, 300\)\. Pass its transpose"),
    ({"head": HEAD[0]}, r"head must be \[V, D\]"),
    ({"head": HEAD[:0]}, r"V of at least 1, got \(0, 16\)"),
    ({"head": jnp.ones((V, D), int)}, "head must be real floating-point numbers"),
    ({"head": jax.tree_util.Partial(lambda x: x), "axis": "vocab"}, "A callable head has no rows to tile"),
    ({"head": lambda x: x @ HEAD.T}, "must carry its parameters as a pytree.*jax.tree_util.Partial"),
    ({"head": jax.tree_util.Partial(jnp.sum)}, r"must make logits \[tokens, V\] of \[tokens, D\]"),
    ({"head": "lm_head"}, "head must be an array"),
    ({"hidden": jnp.float32(1)}, r"hidden must be \[..., D\] with D of at least 1, got shape \(\)"),
    ({"hidden": HIDDEN.astype(jnp.complex64)}, "hidden must be real floating-point numbers.*complex64"),
    ({"hidden": HIDDEN.tolist()}, "hidden must be an array.*Convert it with jnp.asarray"),
    ({"targets": TARGETS[:5]}, r"targets must have hidden's batch shape \(53,\), got \(5,\)"),
    ({"targets": TARGETS * 1.0}, "targets must be integer ids, got float32"),
    ({"weights": jnp.ones(3)}, r"weights must have hidden's batch shape"),
    ({"weights": jnp.ones(N, complex)}, "weights must be real numbers"),
    ({"bias": jnp.ones(3)}, r"bias must be \[V\] = \[300\]"),
    ({"axis": "rows"}, 'axis must be "auto", "tokens" or "vocab", got'),
    ({"reduction": "avg"}, "reduction must be"),
    ({"reduction": "sum", "normalizer": 3.0}, "normalizer belongs to"),
    ({"normalizer": jnp.ones(N)}, r"normalizer must be one real number.*shape \(53,\)"),
    ({"label_smoothing": 1.5}, "label_smoothing must be a number between 0 and 1, got 1.5"),
    ({"logit_softcap": 0.0}, "logit_softcap must be a positive, finite number or None, got 0"),
    ({"logit_softcap": float("inf")}, "logit_softcap must be a positive, finite number or None, got inf"),
    ({"logit_scale": float("nan")}, "logit_scale must be a finite number, got nan"),
    ({"z_loss": jnp.ones(2)}, r"z_loss must be a finite number, got an array of shape \(2,\)"),
    ({"accumulate_dtype": jnp.int32}, "accumulate_dtype must be a floating-point type"),
    ({"num_tiles": 0}, "num_tiles must be a whole number of at least 1, got 0"),
    ({"num_tiles": -1}, "num_tiles must be a whole number of at least 1, got -1"),
    ({"num_tiles": True}, "num_tiles must be a whole number"),
    ({"num_tiles": 2.5}, "num_tiles must be a whole number"),
    ({"ignore_index": 1.5}, "ignore_index must be a whole number"),
    ({"return_stats": 1}, "return_stats must be True or False"),
    ({"vocab_axis_name": "tensor"}, r"vocab_axis_name must be a mesh axis inside jax.shard_map, got 'tensor'"),
    ({"vocab_axis_name": "tensor", "axis": "tokens"}, 'vocab_axis_name goes with axis="vocab"'),
    ({"explain": "print"}, "explain must be a function"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[f"{i}-{'-'.join(c)}" for i, (c, _) in enumerate(BAD)])
def test_bad_input_is_named(changes, message):
    arguments: dict[str, Any] = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS} | changes
    assert re.search(message, fuzz.refused(tiled_cross_entropy, **arguments), re.DOTALL)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), "hot"])
def test_a_bad_temperature_is_named(temperature):
    said = fuzz.refused(tiled_logprobs, HIDDEN, HEAD, TARGETS, temperature=temperature)
    assert said.startswith("temperature must be a positive, finite number (for greedy choices take the argmax)")


def test_numbers_of_the_program_may_be_arrays_but_not_traced():
    plain: dict[str, Any] = {"label_smoothing": 0.25, "z_loss": 0.5, "logit_softcap": 5.0, "logit_scale": 0.5}
    arrays: dict[str, Any] = {name: jnp.float32(value) for name, value in plain.items()}
    expected = tiled_cross_entropy(HIDDEN, HEAD, TARGETS, num_tiles=3, **plain)
    assert tiled_cross_entropy(HIDDEN, HEAD, TARGETS, num_tiles=3, **arrays) == expected

    def traced(z_loss):
        return tiled_cross_entropy(HIDDEN, HEAD, TARGETS, z_loss=z_loss)

    assert "z_loss must be a finite number that is known when" in fuzz.refused(jax.jit(traced), 0.5)
    assert "static_argnames" in fuzz.refused(jax.grad(traced), 0.5)


LOSS = ["hidden", "head", "targets", "weights", "bias", "num_tiles", "axis", "reduction", "normalizer", "ignore_index"]
LOSS += ["label_smoothing", "z_loss", "logit_softcap", "logit_scale", "accumulate_dtype", "return_stats", "explain"]
LOSS += ["vocab_axis_name"]
LOGPROBS = ["hidden", "head", "targets", "num_tiles", "axis", "temperature", "ignore_index"]
CHOICE = ["tokens", "d_model", "vocab", "dtype", "head", "reduction", "axis", "chip", "memory_budget"]


def changes(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), fuzz.junk(), min_size=1, max_size=2)


@settings(fuzz.FUZZ, max_examples=120)
@given(changes(LOSS))
def test_wrong_arguments_of_the_loss(wrong):
    good: dict[str, Any] = {"hidden": HIDDEN[:5, :3], "head": HEAD[:7, :3], "targets": TARGETS[:5] % 7}
    fuzz.refused(lambda: jax.eval_shape(lambda: tiled_cross_entropy(**good | wrong)))


@settings(fuzz.FUZZ, max_examples=40)
@given(changes(LOGPROBS))
def test_wrong_arguments_of_the_log_probabilities(wrong):
    good: dict[str, Any] = {"hidden": HIDDEN[:5, :3], "head": HEAD[:7, :3], "targets": TARGETS[:5] % 7}
    fuzz.refused(lambda: jax.eval_shape(lambda: tiled_logprobs(**good | wrong)))


@settings(fuzz.FUZZ, max_examples=150)
@given(changes(CHOICE))
def test_wrong_arguments_of_the_choice(wrong):
    good: dict[str, Any] = {"tokens": 64, "d_model": 16, "vocab": 300, "chip": "v5e-1"}
    fuzz.refused(choose_tiles, **good | wrong)
