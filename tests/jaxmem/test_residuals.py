"""What is kept for the backward pass, and measuring a call that runs."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

from jaxmem.tracing.residuals import saved_residuals

X, W = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((3, 16, 16), "float32")
POLICIES = jax.checkpoint_policies


def layer(x, w):
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    return jnp.sin(h) * x


def scanned(x, w, body=layer):
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0].sum()


def unrolled(x, w, body=layer):
    for i in range(3):
        x = body(x, w[i])
    return x.sum()


def line_of(fn, offset: int) -> str:
    return f"test_residuals.py:{fn.__code__.co_firstlineno + offset}"


def test_loops_are_looked_into():
    rows = saved_residuals(scanned, X, W).rows
    assert [(row.argument, row.shape) for row in rows if row.argument] == [("[1]", (3, 16, 16))]
    kept = {row.operation: row.source for row in rows if not row.argument}
    tanh = kept.get("tanh") or kept["one_minus_square"]  # what its derivative keeps depends on the version of JAX
    assert tanh == line_of(layer, 1) and kept["cos"] == kept["sin"] == line_of(layer, 2)
    assert all(row.shape == (3, 8, 16) for row in rows if not row.argument)


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_bytes_are_those_of_the_vjp_function(stack):
    residuals = saved_residuals(stack, X, W)
    assert residuals.bytes == sum(row.bytes for row in residuals.rows if not row.argument) > 0
    backward = jax.vjp(stack, jnp.ones(X.shape), jnp.ones(W.shape))[1]
    assert residuals.bytes + residuals.argument_bytes == sum(a.nbytes for a in jax.tree.leaves(backward))


def test_the_same_as_jax_prints(capsys):
    print_saved_residuals(unrolled, X, W)
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(printed) == len(saved_residuals(unrolled, X, W).rows)


@pytest.mark.quick
def test_checkpoint_keeps_inputs_and_named_values():
    inputs = saved_residuals(functools.partial(scanned, body=jax.checkpoint(layer)), X, W)
    assert [row.operation for row in inputs.rows if not row.argument] == ["the loop's input of each iteration"]
    assert inputs.bytes == 4 * 3 * 8 * 16
    named = jax.checkpoint(layer, policy=POLICIES.save_only_these_names("h"))
    kept = saved_residuals(jax.jit(functools.partial(scanned, body=named)), X, W)
    assert {row.operation for row in kept.rows if not row.argument} == {
        "named 'h'",
        "the loop's input of each iteration",
    }
    assert "named 'h'" in str(kept) and str(kept).startswith("3.00 KiB kept")
    assert "<td>named &#x27;h&#x27;</td>" in kept._repr_html_()


MEASURED = """
import jax.numpy as jnp, numpy as np
from measured import measure

def grows(x):  # 16 MiB that no fusion avoids
    return jnp.sort(jnp.outer(x, x), axis=0)[::7].sum()

# What is freed stays resident for a while, in holes of every size: it must not hide a later call's rise.
holes = [np.ones(n) for n in np.random.default_rng(0).integers(10_000, 4_000_000, 60)]
del holes[::2]
_, small, large = (measure(grows, jnp.arange(n, dtype=jnp.float32)) for n in (2048, 128, 2048))
print(large.rise_bytes - small.rise_bytes, str(large))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured on Linux")
def test_measuring_sees_what_the_call_takes():
    """In a process of its own: one that ran thousands of programs may have room that nobody gives back."""
    where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", MEASURED], env=where, capture_output=True, text=True, check=True)
    rise, told = run.stdout.split(" ", 1)
    assert int(rise) > 14 * 2**20 and "MiB above" in told
