"""Wrong arguments for stacks and policies: refused by the package itself, in its own words."""

from typing import Any

import jax.numpy as jnp
import pytest
from fuzz import FUZZ, junk, refused
from hypothesis import given, settings
from hypothesis import strategies as st

import llamem

pytestmark = pytest.mark.usefixtures("as_a_user")
FEW = settings(FUZZ, max_examples=25)
untyped: Any = llamem
STACKED = {"w": jnp.ones((3, 5, 5))}


def layer(params, x):
    """Takes whatever it is given: what a user's own layer raises is the user's."""
    return jnp.tanh(x)


@FEW
@given(data=st.data())
def test_stacks(data):
    name = data.draw(st.sampled_from(["layer", "stacked", "per_layer", "mode", "remat"]))
    good = {"layer": layer, "stacked": STACKED, "x": jnp.ones((2, 5))}
    value = data.draw(junk())
    if name == "layer" and callable(value):
        return
    refused(untyped.apply_stack, **{**good, name: value})


@FEW
@given(value=junk())
def test_lists_of_layers(value):
    refused(untyped.stack_layers, value)
    refused(untyped.stack_layers, [STACKED, value])
    refused(untyped.stack_layers, [{"w": value}, {"w": jnp.ones(2)}])
    refused(untyped.unstack_layers, value)


@FEW
@given(fields=st.dictionaries(st.sampled_from(sorted(llamem.Policy.__dataclass_fields__)), junk(), min_size=1))
def test_policies(fields):
    refused(untyped.Policy, **fields)
    for value in fields.values():
        assert refused(untyped.Plan, remat=value) or value is None


def test_a_missing_argument_is_named_by_python():
    for call in (untyped.apply_stack, untyped.stack_layers, untyped.unstack_layers):
        with pytest.raises(TypeError, match=r"missing .* required"):
            call()
