"""Advice: what it says is saved, against the program that follows it; which remedies are found, and which are not."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.advice import scans_checkpointed
from jaxmem.reading.hlo import unnumbered
from llamem.layers.attention import causal_attention

D, L, N, V = 160, 6, 3000, 2000
TX = optax.adamw(1e-3)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


STACK = {"up": shape(L, D, 4 * D), "down": shape(L, 4 * D, D)}
X = shape(N, D)


def layer(w, x):
    h = checkpoint_name(x @ w["up"], "up")
    return x + checkpoint_name(jnp.sin(jnp.tanh(h)) @ w["down"], "down")


def scanned(w, x, policy=None):
    body = layer if policy is None else jax.checkpoint(layer, prevent_cse=False, policy=policy)
    return jnp.mean(jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0] ** 2)


def step_of(loss):
    def step(w, m, *batch):
        gradients = jax.grad(loss)(w, *batch)
        updates, m = TX.update(gradients, m, w)
        return optax.apply_updates(w, updates), m

    return step


def report_of(loss, w, *batch, donate=(0, 1), chip="local"):
    return jaxmem.compile_report(step_of(loss), w, jax.eval_shape(TX.init, w), *batch, donate_argnums=donate, chip=chip)


def about(advice, words) -> Any:
    return next((remedy for remedy in advice if words in remedy.cause), None)


@pytest.mark.quick
def test_a_forgotten_donation_saves_what_it_says():
    forgotten = report_of(scanned, STACK, X, donate=())
    remedy = about(forgotten.advice, "not donated")
    followed = report_of(scanned, STACK, X)
    assert remedy.compiled and "donate_argnums=(0, 1)" in remedy.code and remedy.arrays
    assert remedy.bytes == forgotten.peak_bytes - followed.peak_bytes > 2**22
    assert about(followed.advice, "not donated") is None


def test_a_scan_that_keeps_all_saves_what_it_says():
    """Compiled without the user's help, and after the same scan had been traced without a checkpoint."""
    before = report_of(scanned, STACK, X)
    remedy = before.advice[0]
    followed = report_of(lambda w, x: scanned(w, x, jax.checkpoint_policies.nothing_saveable), STACK, X)
    saved = before.peak_bytes - followed.peak_bytes
    assert "scan keeps" in remedy.cause and remedy.compiled
    assert abs(remedy.bytes - saved) < 0.05 * saved and saved > before.peak_bytes / 3
    assert about(followed.advice, "scan keeps") is None


@pytest.mark.quick
def test_scans_are_checkpointed_for_the_thread_that_asks_and_no_longer():
    def text():
        return str(jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3))(1.0))

    with scans_checkpointed(), ThreadPoolExecutor(1) as other:
        here, there = text(), other.submit(text).result()
    assert "prevent_cse" in here and "prevent_cse" not in there and "prevent_cse" not in text()


def test_all_logits_are_told_with_what_tiles_save():
    def logits(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w["head"], y).mean()

    report = report_of(logits, {"head": shape(D, V)}, X, shape(N, dtype="int32"))
    remedy = about(report.advice, "all logits")
    assert not remedy.compiled and remedy.bytes > 0.8 * 4 * N * V and f"f32[{N},{V}]" in " ".join(remedy.arrays)


def test_layers_of_a_list_are_one_row_of_arrays_and_their_remedy_is_estimated():
    def listed(w, x):
        for one in w:
            x = layer(one, x)
        return jnp.mean(x**2)

    rows = [jax.tree.map(lambda leaf: shape(*leaf.shape[1:]), STACK)] * L
    report = report_of(listed, rows, X)
    if report.timeline is None:
        pytest.skip(report.no_timeline)
    followed = report_of(lambda w, x: scanned(w, x, jax.checkpoint_policies.nothing_saveable), STACK, X)
    remedy, saved = about(report.advice, "a list of"), report.peak_bytes - followed.peak_bytes
    assert abs(remedy.bytes - saved) < 0.2 * saved and "apply_stack" in remedy.code
    rows = [(row.shape, unnumbered(row.operation)) for row in report.buffers]
    assert len(rows) == len(set(rows)) and any((row.at_once or 0) >= L for row in report.buffers)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_kernel_for_attention_saves_what_is_said_where_a_tpu_pads_its_heads():
    """Heads of 64, whose queries, keys, values and outputs take the room of heads of 128 in the kernel."""
    layers, width = 3, 512

    def listed(implementation):
        def loss(w, x):
            for one in w:
                q, k, v = (y.reshape(16, 512, 8, 64) for y in jnp.split(x @ one["qkv"], 3, -1))
                mixed = causal_attention(q, k, v, implementation=implementation)
                x = x + mixed.reshape(x.shape) @ one["out"]
            return jnp.mean(x.astype("float32") ** 2)

        return loss

    one = {"qkv": shape(width, 3 * width, dtype="bfloat16"), "out": shape(width, width, dtype="bfloat16")}
    given = [one] * layers, shape(16, 512, width, dtype="bfloat16")
    plain, followed = (report_of(listed(how), *given, chip="v5e-1") for how in ("xla", "splash"))
    remedy, saved = about(plain.advice, "scores of all pairs"), plain.peak_bytes - followed.peak_bytes
    assert abs(remedy.bytes - saved) < 0.1 * saved and saved > plain.peak_bytes / 3
    assert about(followed.advice, "scores of all pairs") is None


def test_as_many_tokens_as_an_mlp_is_wide_are_no_pairs_of_tokens():
    alike = report_of(scanned, STACK, shape(2, 4 * D, D))  # each layer keeps [2, 4 D, 4 D]
    assert about(alike.advice, "keeps what each of its turns computes") and alike.peak_bytes > 2 * L * (4 * D) ** 2 * 4
    assert about(alike.advice, "scores of all pairs") is None

    # Nor are they counted where attention, with four heads, makes pairs of as many tokens too.
    def attended(w, x):
        q, k, v = (x.reshape(2, 4 * D, 4, D // 4) for _ in range(3))
        return scanned(w, causal_attention(q, k, v, implementation="xla").reshape(x.shape))

    remedy = about(report_of(attended, STACK, shape(2, 4 * D, D)).advice, "scores of all pairs")
    assert remedy is None or all(f"[2,{4 * D},{4 * D}]" not in row for row in remedy.arrays), remedy


def test_sixteen_bits_and_copies_are_found_by_their_names():
    w = {"wide": shape(V, D), "narrow": shape(4 * V, D, dtype="bfloat16")}
    tx = optax.MultiSteps(TX, 4)

    def loss(w, x):
        return jnp.mean((x @ w["wide"].T) ** 2) + jnp.mean((x.astype("bfloat16") @ w["narrow"].T) ** 2)

    def step(w, m, x):
        updates, m = tx.update(jax.grad(loss)(w, x), m, w)
        return optax.apply_updates(w, updates), m

    moments = jax.eval_shape(tx.gradient_transformation().init, w)
    wide = jax.tree.map(lambda leaf: shape(*leaf.shape, dtype="float32" if leaf.ndim else leaf.dtype), moments)
    advice = jaxmem.compile_report(step, w, wide, shape(64, D), donate_argnums=(0, 1)).advice
    assert about(advice, "first moments").bytes == 2 * 4 * V * D
    assert about(advice, "more than two moments").bytes == 4 * 5 * V * D
    assert "`w['wide']`" in about(advice, "weights in float32").code


def test_advice_is_made_when_it_is_read_and_not_kept_in_files():
    report = report_of(scanned, STACK, X)
    again = pickle.loads(pickle.dumps(report))
    assert again == report and jaxmem.Report.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="read from a file"):
        again.advice  # noqa: B018
    assert len(report.advice) <= 5 and "1. saves" in str(report.advice)
    sizes = [remedy.bytes for remedy in report.advice]
    assert sizes == sorted(sizes, reverse=True)
    assert dataclasses.asdict(report)["peak_bytes"] == report.peak_bytes


def test_a_budget_ends_with_a_policy_and_its_price():
    weights = {"a": shape(L, D, 4 * D), "b": shape(L, 4 * D, 2 * D), "c": shape(L, 2 * D, D)}

    def make_step(policy):
        def body(x, w):
            a = checkpoint_name(x @ w["a"], "a")
            b = checkpoint_name(jnp.sin(jnp.tanh(a)) @ w["b"], "b")
            return x + jnp.tanh(b) @ w["c"], None

        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        step = step_of(lambda w, x: jnp.mean(jax.lax.scan(body, x, w)[0] ** 2))
        return step, weights, jax.eval_shape(TX.init, weights), X

    def peak(policy):
        return jaxmem.compile_report(*make_step(policy), donate_argnums=(0, 1)).peak_bytes

    only = jax.checkpoint_policies.save_only_these_names
    least, most = peak(jax.checkpoint_policies.nothing_saveable), peak(only("a", "b"))
    options = {"donate_argnums": (0, 1), "progress": None}
    everything = jaxmem.keep_what_fits(make_step, at_most=most, **options)
    assert everything.report.peak_bytes == most and len(everything.answers) == 1
    found = jaxmem.keep_what_fits(make_step, at_most=peak(only("b")), **options)
    assert found.name == "save_only_these_names('b')", found  # four times the products of "a", in half the bytes
    assert least < found.report.peak_bytes == peak(only("b")) < most
    assert found.report.matmul_flops < found.answers["nothing_saveable"].matmul_flops  # pyrefly: ignore[missing-attribute]
    assert callable(found.how["policy"])
    with pytest.raises(jaxmem.NothingFits):
        jaxmem.keep_what_fits(make_step, at_most=least - 1, **options)
    with pytest.raises(ValueError, match="no activation of the step has a name"):
        jaxmem.keep_what_fits(lambda policy: (lambda x: jnp.sin(x), shape(3)), **options)


def test_one_weight_of_the_rest_is_no_stack_and_small_programs_need_nothing():
    report = jaxmem.compile_report(lambda x: np.pi * x, shape(3))
    assert len(report.advice) == 0 and "no remedy" in str(report.advice)
