"""What the losses refuse, and what they say."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs

N, D, V = 53, 16, 300
KEYS = jax.random.split(jax.random.key(0), 3)
HIDDEN, HEAD = jax.random.normal(KEYS[0], (N, D)), jax.random.normal(KEYS[1], (V, D))
TARGETS = jax.random.randint(KEYS[2], (N,), 0, V)
pytestmark = pytest.mark.usefixtures("as_a_user")

BAD: list[tuple[dict[str, Any], str]] = [
    ({"head": HEAD.T}, r"head must be \[V, D\] with D = 16, got \(16, 300\)\. Pass its transpose"),
    ({"head": HEAD[:0]}, r"head must be \[V, D\] with V of at least 1, got \(0, 16\)"),
    ({"head": jnp.ones((V, D), int)}, "head must be an array of real floating-point numbers"),
    ({"head": lambda x: x @ HEAD.T}, r"head must be an array \[V, D\], or a tuple"),
    ({"head": ()}, "head must be an array"),
    ({"head": (HEAD, HEAD)}, r"a head of several matrices must be .* = 16"),
    ({"head": (HEAD[:, :9], HEAD[1:, 9:])}, r"a head of several matrices must be .* = 16"),
    ({"head": (HEAD[:, :9], HEAD[0])}, r"a head of several matrices must be .* = 16"),
    ({"hidden": HIDDEN.tolist()}, "hidden must be an array.*Convert it.*with jnp.asarray"),
    ({"targets": TARGETS[:5]}, r"targets must have hidden's batch shape \(53,\), got \(5,\)"),
    ({"targets": TARGETS * 1.0}, "targets must be integer ids, got float32"),
    ({"weights": jnp.ones(3)}, r"weights must be real numbers in hidden's batch shape"),
    ({"axis": "rows"}, r"axis='rows': expected one of 'auto', 'tokens', 'vocab'"),
    ({"reduction": "sum", "normalizer": 3.0}, "normalizer belongs to"),
    ({"normalizer": jnp.ones(N)}, r"normalizer must be one number.*got shape \(53,\)"),
    ({"head_trained": "frozen"}, "head_trained='frozen': expected one of True, False"),
    ({"logit_softcap": 0.0}, "logit_softcap=0.0: expected a finite number above 0"),
    ({"num_tiles": 2.5}, "num_tiles=2.5: expected a whole number"),
    ({"axis": "tokens", "reduction": "none"}, 'reduction="none" and vocab_axis_name go with axis="vocab"'),
    ({"vocab_axis_name": "tensor", "axis": "tokens"}, 'vocab_axis_name go with axis="vocab"'),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[f"{i}-{'-'.join(c)}" for i, (c, _) in enumerate(BAD)])
def test_bad_input_is_named(changes, message):
    arguments: dict[str, Any] = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS} | changes
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        tiled_cross_entropy(**arguments)


def test_a_temperature_of_0_is_named():
    with pytest.raises(ValueError, match=r"temperature=0.*expected a finite number above 0"):
        tiled_logprobs(HIDDEN, HEAD, TARGETS, temperature=0.0)


def test_numbers_of_the_program_may_be_arrays_but_not_traced():
    plain: dict[str, Any] = {"z_loss": 0.5, "logit_softcap": 5.0, "logit_scale": 0.5}
    arrays: dict[str, Any] = {name: jnp.float32(value) for name, value in plain.items()}
    expected = tiled_cross_entropy(HIDDEN, HEAD, TARGETS, num_tiles=3, **plain)
    assert tiled_cross_entropy(HIDDEN, HEAD, TARGETS, num_tiles=3, **arrays) == expected
    with pytest.raises(TypeError, match=r"z_loss must be a number that is known when.*static_argnames"):
        jax.jit(lambda z_loss: tiled_cross_entropy(HIDDEN, HEAD, TARGETS, z_loss=z_loss))(0.5)
