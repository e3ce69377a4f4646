"""Policies: what each keeps, under both of JAX's rematerialisations; what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
import llamem
from jaxmem.tracing.residuals import saved_residuals
from llamem import POLICIES, Policy
from llamem.layers import remat

X = jax.random.normal(jax.random.key(0), (2, 6, 5))
W = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(
    {"wq": (5, 7), "up": (5, 9), "down": (9, 5)}.items(), start=1)}  # fmt: skip


def layer(w, x):
    q = checkpoint_name(jnp.tanh(x @ w["wq"]), "q")
    attn = checkpoint_name(jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, q)) @ x, "attn")
    up = checkpoint_name(jnp.sin(attn @ w["up"]), "up")
    return jnp.cos(up @ w["down"])


C = jax.random.normal(jax.random.key(9), (2, 6, 5))


def loss(policy):
    return lambda w, x, c: jnp.sum(remat.checkpoint(layer, policy)(w, x) * jax.lax.stop_gradient(c))


# Sorted shapes of what is kept and is no argument. Names: q [2,6,7], attn [2,6,5], up [2,6,9].
Q, ATTN, UP = (2, 6, 7), (2, 6, 5), (2, 6, 9)
NAMED = {
    "nothing": [],
    Policy(): [],
    Policy(save=("q",)): [Q],
    Policy(save=("attn", "up")): [ATTN, UP],
    Policy(save_all_but=("up",)): [ATTN, Q],
    "nothing_saveable": [],
}


@pytest.mark.quick
def test_a_policy_of_names_keeps_these_arrays_and_no_other(remat3):
    for policy, kept in NAMED.items():
        rows = [row for row in saved_residuals(loss(policy), W, X, C).rows if not row.argument]
        named = [row.shape for row in rows if row.operation.startswith("named '")]
        assert sorted(named) == sorted(kept), policy
        assert len(rows) == len(named) + 1, policy  # and the cotangent's weights, which do not belong to the layer


def test_jax_other_names_of_policies_are_the_same_policies():
    for name in ("dots", "dots_with_no_batch_dims"):
        assert POLICIES[f"checkpoint_{name}"] is POLICIES[f"{name}_saveable"]
    kept = {
        name: saved_residuals(loss(name), W, X, C).bytes for name in ("nothing", "dots_saveable", "checkpoint_dots")
    }
    assert kept["checkpoint_dots"] == kept["dots_saveable"] > kept["nothing"]


def cannot(policy) -> bool:
    """What remat3 does not understand and would silently treat as "recompute everything"."""
    return remat.offloads(policy) and getattr(jax.config, "jax_remat3", False)


EVERY = [*(name for name in POLICIES if name in ("nothing", "attn") or name.endswith("saveable")), *NAMED]
EVERY += [Policy(save=("q",), offload=("up",))]


def test_no_policy_changes_a_gradient(remat3):
    expected = jax.jit(jax.grad(loss(None), argnums=(0, 1)))(W, X, C)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    for policy in dict.fromkeys(EVERY):
        if cannot(policy):
            with pytest.raises(ValueError, match="jax_remat3 on, this JAX would recompute everything"):
                jax.grad(loss(policy))(W, X, C)
            continue
        actual = jax.jit(jax.grad(loss(policy), argnums=(0, 1)))(W, X, C)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=str(policy))


def test_names_are_found_inside_checkpoints_and_unknown_ones_refused(remat3, as_a_user):
    stacked = {name: jnp.stack([w, w]) for name, w in W.items()}
    inner = remat.checkpoint(layer, "nothing")
    llamem.apply_stack(inner, stacked, X, remat=Policy(save=("attn",)))
    with pytest.raises(ValueError, match=r"mentions \['atn'\], but the layer produces \['attn', 'q', 'up'\]"):
        llamem.apply_stack(inner, stacked, X, remat=Policy(save=("atn",)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy(save=("q",), offload=("q",)), r"\['q'\] cannot be both"),
        (lambda: Policy(save=("q",), save_all_but=("up",)), "save_all_but stands alone"),
        (lambda: remat.checkpoint(layer, "dots"), "'dots'. Known: .*checkpoint_dots, .*None, which keeps everything"),
    ],
)
def test_bad_policies_are_refused(as_a_user, make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("as_a_user")
def test_a_set_of_names_has_one_order():
    """Of three letters each hash seed makes its own order; a plan's words are what hosts compare."""
    for names in ({"q", "k", "attn", "up"}, frozenset({"up", "q", "k", "attn"})):
        assert Policy(save=names).save == ("attn", "k", "q", "up")  # pyrefly: ignore[bad-argument-type]
    assert Policy(save=("q", "attn")).save == ("q", "attn")


def test_offload_that_stays_is_said_aloud():
    report = jaxmem.compile_report(jax.grad(loss(Policy(offload=("up",)))), W, X, C)
    assert any("in the host's memory count as the device's" in warning for warning in report.warnings)
    assert not jaxmem.compile_report(jax.grad(loss(Policy(save=("up",)))), W, X, C).warnings
