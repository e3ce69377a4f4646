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
    ({"head": lambda x: x @ HEAD.T}, r"head must be an array \[V, D\], or a tuple"),
    ({"hidden": jnp.float32(1)}, r"hidden must be \[..., D\] with D of at least 1, got shape \(\)"),
    ({"hidden": HIDDEN.astype(jnp.complex64)}, "hidden must be real floating-point numbers.*complex64"),
    ({"hidden": HIDDEN.tolist()}, "hidden must be an array.*Convert it with jnp.asarray"),
    ({"targets": TARGETS[:5]}, r"targets must have hidden's batch shape \(53,\), got \(5,\)"),
    ({"targets": TARGETS * 1.0}, "targets must be integer ids, got float32"),
    ({"weights": jnp.ones(3)}, r"weights must have hidden's batch shape"),
    ({"weights": jnp.ones(N, complex)}, "weights must be real numbers"),
    ({"bias": jnp.ones(3)}, r"bias must be \[V\] = \[300\]"),
    ({"axis": "rows"}, r"axis='rows': expected one of 'auto', 'tokens', 'vocab'"),
    ({"reduction": "avg"}, "reduction='avg': expected one of"),
    ({"reduction": "sum", "normalizer": 3.0}, "normalizer belongs to"),
    ({"normalizer": jnp.ones(N)}, r"normalizer must be one real number.*shape \(53,\)"),
    ({"label_smoothing": 1.5}, "label_smoothing=1.5: expected a number between 0 and 1"),
    ({"logit_softcap": 0.0}, "logit_softcap=0.0: expected a finite number above 0"),
    ({"logit_softcap": float("inf")}, "logit_softcap=inf: expected a finite number above 0"),
    ({"logit_scale": float("nan")}, "logit_scale=nan: expected a finite number"),
    ({"z_loss": jnp.ones(2)}, "z_loss=Array.*expected a finite number"),
    ({"num_tiles": 0}, "num_tiles=0: expected a whole number of at least 1"),
    ({"num_tiles": True}, "num_tiles=True: expected a whole number"),
    ({"num_tiles": 2.5}, "num_tiles=2.5: expected a whole number"),
    ({"ignore_index": 1.5}, "ignore_index=1.5: expected a whole number"),
    ({"axis": "tokens", "reduction": "none"}, 'reduction="none" works on tiles of the vocabulary'),
    ({"vocab_axis_name": "tensor"}, r"vocab_axis_name must be a mesh axis inside jax.shard_map, got 'tensor'"),
    ({"vocab_axis_name": "tensor", "axis": "tokens"}, 'vocab_axis_name goes with axis="vocab"'),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[f"{i}-{'-'.join(c)}" for i, (c, _) in enumerate(BAD)])
def test_bad_input_is_named(changes, message):
    arguments: dict[str, Any] = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS} | changes
    assert re.search(message, fuzz.refused(tiled_cross_entropy, **arguments), re.DOTALL)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), "hot"])
def test_a_bad_temperature_is_named(temperature):
    said = fuzz.refused(tiled_logprobs, HIDDEN, HEAD, TARGETS, temperature=temperature)
    assert "temperature=" in said and "expected a finite number above 0" in said


def test_numbers_of_the_program_may_be_arrays_but_not_traced():
    plain: dict[str, Any] = {"label_smoothing": 0.25, "z_loss": 0.5, "logit_softcap": 5.0, "logit_scale": 0.5}
    arrays: dict[str, Any] = {name: jnp.float32(value) for name, value in plain.items()}
    expected = tiled_cross_entropy(HIDDEN, HEAD, TARGETS, num_tiles=3, **plain)
    assert tiled_cross_entropy(HIDDEN, HEAD, TARGETS, num_tiles=3, **arrays) == expected

    def traced(z_loss):
        return tiled_cross_entropy(HIDDEN, HEAD, TARGETS, z_loss=z_loss)

    assert "z_loss must be a number that is known when" in fuzz.refused(jax.jit(traced), 0.5)
    assert "static_argnames" in fuzz.refused(jax.grad(traced), 0.5)


LOSS = ["hidden", "head", "targets", "weights", "bias", "num_tiles", "axis", "reduction", "normalizer", "ignore_index"]
LOSS += ["label_smoothing", "z_loss", "logit_softcap", "logit_scale", "vocab_axis_name"]
LOGPROBS = ["hidden", "head", "targets", "num_tiles", "temperature", "ignore_index"]
CHOICE = ["tokens", "d_model", "vocab", "dtype", "head", "axis", "chip", "memory_budget"]


def changes(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), fuzz.junk(), min_size=1, max_size=2)


@settings(fuzz.FUZZ, max_examples=60)
@given(changes(LOSS))
def test_wrong_arguments_of_the_loss(wrong):
    good: dict[str, Any] = {"hidden": HIDDEN[:5, :3], "head": HEAD[:7, :3], "targets": TARGETS[:5] % 7}
    fuzz.refused(lambda: jax.eval_shape(lambda: tiled_cross_entropy(**good | wrong)))


@settings(fuzz.FUZZ, max_examples=20)
@given(changes(LOGPROBS))
def test_wrong_arguments_of_the_log_probabilities(wrong):
    good: dict[str, Any] = {"hidden": HIDDEN[:5, :3], "head": HEAD[:7, :3], "targets": TARGETS[:5] % 7}
    fuzz.refused(lambda: jax.eval_shape(lambda: tiled_logprobs(**good | wrong)))


@settings(fuzz.FUZZ, max_examples=60)
@given(changes(CHOICE))
def test_wrong_arguments_of_the_choice(wrong):
    good: dict[str, Any] = {"tokens": 64, "d_model": 16, "vocab": 300, "chip": "v5e-1"}
    fuzz.refused(choose_tiles, **good | wrong)
