"""Wrong answers to the exercises of notebook 09: each is refused, with a hint that leads on and does not tell."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import Answers, refuse

from llamem_course.exercises import adapters as lora


def merged_weight(w, down, up, scale):
    return (w.astype(jnp.float32) + scale * down @ up).astype(w.dtype)


def adapted(x, w, down, up, scale, adapter):
    z_BTR = jnp.einsum("BTD,BDR->BTR", x, down[adapter]) * scale[adapter][:, None, None]
    return x @ w + jnp.einsum("BTR,BRF->BTF", z_BTR, up[adapter])


def merged(x, w, down, up, scale, adapter):
    delta = jnp.einsum("BDR,BRF->BDF", down[adapter], up[adapter]) * scale[adapter][:, None, None]
    return jnp.einsum("BTD,BDF->BTF", x, w + delta)


def merged_by_adapter(x, w, down, up, scale, adapter):
    whole = w + jnp.einsum("ADR,ARF->ADF", down, up) * scale[:, None, None]
    return jnp.stack([row @ whole[a] for row, a in zip(x, adapter, strict=True)])


def everyone(x, w, down, up, scale, adapter):
    z_BATR = jnp.einsum("BTD,ADR->BATR", x, down) * scale[:, None, None]
    own_BA = jax.nn.one_hot(adapter, len(scale))
    return x @ w + jnp.einsum("BATR,ARF,BA->BTF", z_BATR, up, own_BA)


def by_token(x, w, down, up, scale, adapter):
    rows, own = x.reshape(-1, x.shape[2]), jnp.repeat(adapter, x.shape[1])
    z_NR = jnp.einsum("ND,NDR->NR", rows, down[own]) * scale[own][:, None]
    return x @ w + jnp.einsum("NR,NRF->NF", z_NR, up[own]).reshape(*x.shape[:2], -1)


def merged_in_a_loop(x, w, down, up, scale, adapter):
    return jax.lax.map(lambda one: one[0] @ (w + scale[one[1]] * down[one[1]] @ up[one[1]]), (x, adapter))


def sequence_by_sequence(x, w, down, up, scale, adapter):
    return jnp.stack([row @ w + scale[a] * (row @ down[a]) @ up[a] for row, a in zip(x, adapter, strict=True)])


def sequences_in_a_loop(x, w, down, up, scale, adapter):
    one = lambda given: given[0] @ w + scale[given[1]] * (given[0] @ down[given[1]]) @ up[given[1]]  # noqa: E731
    return jax.lax.map(one, (x, adapter))


def token_by_token(x, w, down, up, scale, adapter):
    whole = [sequence_by_sequence(x[:, t : t + 1], w, down, up, scale, adapter) for t in range(x.shape[1])]
    return jnp.concatenate(whole, axis=1)


def thin_products_in_a_loop(x, w, down, up, scale, adapter):
    rows = [scale[a] * (row @ down[a]) @ up[a] for row, a in zip(x, adapter, strict=True)]
    return x @ w + jnp.stack(rows)


def number_by_number(values, scale, dtype):
    numbers = np.zeros((len(values), 32 * values.shape[1]), np.float32)
    for row, block, byte in np.ndindex(*values.shape):
        both, stretch = int(values[row, block, byte]), np.float32(scale[row, block])
        numbers[row, 32 * block + byte] = stretch * ((both & 15) - 8)
        numbers[row, 32 * block + byte + 16] = stretch * ((both >> 4) - 8)
    return jnp.asarray(numbers).astype(dtype)


def in_numpy(values, scale, dtype):
    values, scale = np.asarray(values), np.asarray(scale, np.float32)
    q = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.float32) - 8
    return jnp.asarray((q * scale[..., None]).reshape(len(values), -1)).astype(dtype)


def block_by_block(values, scale, dtype):
    rows = []
    for row, stretches in zip(values, scale, strict=True):
        numbers = [
            (jnp.concatenate([block & 15, block >> 4]).astype(jnp.float32) - 8) * stretch.astype(jnp.float32)
            for block, stretch in zip(row, stretches, strict=True)
        ]
        rows.append(jnp.concatenate(numbers))
    return jnp.stack(rows).astype(dtype)


def row_by_row(values, scale, dtype):
    return jnp.stack([blocks(values[i : i + 1], scale[i : i + 1], dtype)[0] for i in range(len(values))])


def blocks(values, scale, dtype, way="right", minus=8, low=15):
    halves = [values & low, values >> 4]
    q = jnp.concatenate(halves[::-1] if way == "high" else halves, axis=-1)
    if way == "stack":
        q = jnp.stack(halves, axis=-1).reshape(*values.shape[:2], 32)
    if way == "halves":
        q = jnp.concatenate(halves, axis=1).reshape(*values.shape[:2], 32)
    if way == "uint8":
        q, minus = q - 8, 0
    if way == "a signed byte":
        q = jnp.concatenate([values & 15, (values.astype(jnp.int8) >> 4).astype(jnp.uint8)], axis=-1)
    if way == "minus last":
        return (blocks(values, scale, jnp.float32, minus=0) - 8).astype(dtype)
    if way == "divided":
        return blocks(values, 1 / scale.astype(jnp.float32), dtype)
    if way == "columns":
        return blocks(values, scale, dtype).reshape(-1, len(values)).T
    if way == "float16":
        return blocks(values, scale, jnp.float16, way="early").astype(dtype)
    if way == "the scale rounded":
        return blocks(values, scale.astype(dtype), dtype)
    if way == "signed":
        q, minus = jnp.where(q > 7, q.astype(jnp.float32) - 16, q), 0
    kept = dtype if way == "early" else jnp.float32
    numbers = (q.astype(kept) - minus) * scale.astype(kept)[..., None]
    return numbers.reshape(len(values), -1).astype(dtype)


WRONG: Answers = {
    "what the adapter adds": (lora.check_merged_weight, lambda w, d, u, s: s * d @ u, "what the adapter adds"),
    "the weight as it was": (lora.check_merged_weight, lambda w, d, u, s: w, "with a scale of 1"),
    "a scale that is alpha": (
        lora.check_merged_weight,
        lambda w, d, u, s: merged_weight(w, d, u, s / d.shape[1]),
        "already alpha / r",
    ),
    "no scale in the merge": (lora.check_merged_weight, lambda w, d, u, s: merged_weight(w, d, u, 1.0), "not with 2.5"),
    "all of it scaled": (lora.check_merged_weight, lambda w, d, u, s: s * merged_weight(w, d, u, 1.0), "not with 2.5"),
    "a scale without its sign": (
        lora.check_merged_weight,
        lambda w, d, u, s: merged_weight(w, d, u, abs(s)),
        "with one below",
    ),
    "the adapter taken off": (
        lora.check_merged_weight,
        lambda w, d, u, s: merged_weight(w, d, u, -s),
        "with a scale of 1",
    ),
    "a matrix of float32": (
        lora.check_merged_weight,
        lambda w, d, u, s: w.astype(jnp.float32) + s * d @ u,
        "the matrix was bfloat16",
    ),
    "the delta rounded first": (
        lora.check_merged_weight,
        lambda w, d, u, s: w + (s * d @ u).astype(w.dtype),
        "a rounding",
    ),
    "the factors rounded first": (
        lora.check_merged_weight,
        lambda w, d, u, s: merged_weight(w, d.astype(w.dtype), u.astype(w.dtype), s),
        "a rounding",
    ),
    "another shape": (lora.check_merged_weight, lambda w, d, u, s: merged_weight(w, d, u, s).T, "its shape"),
    "the weight alone": (lora.check_adapted, lambda x, w, *rest: x @ w, "the LoRA that you built"),
    "the delta alone": (
        lora.check_adapted,
        lambda x, w, *rest: adapted(x, w, *rest) - x @ w,
        "the LoRA that you built",
    ),
    "the first example's adapter for all": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d, u, s, jnp.full_like(a, a[0])),
        "one for each example is not",
    ),
    "the whole layer scaled": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: s[a][:, None, None] * adapted(x, w, d, u, jnp.ones_like(s), a),
        "what does it multiply",
    ),
    "no scale": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d, u, jnp.ones_like(s), a),
        "a scale of its own",
    ),
    "weights merged for each example": (lora.check_adapted, merged, "you merge weights"),
    "weights merged for each adapter": (lora.check_adapted, merged_by_adapter, "you merge weights"),
    "every adapter for every example": (lora.check_adapted, everyone, "not its own"),
    "four adapters": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d[:4], u[:4], s[:4], a),
        "written down",
    ),
    "rank three": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d[..., :3], u[:, :3], s, a),
        "written down",
    ),
    "the scale twice": (lora.check_adapted, lambda x, w, d, u, s, a: adapted(x, w, d, u, s * s, a), "once"),
    "the mean scale": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d, u, 0 * s + s.mean(), a),
        "a scale of its own",
    ),
    "adapters in order": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d, u, s, jnp.sort(a)),
        "one for each example is not",
    ),
    "adapters that send nothing down": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: x @ w + s[a][:, None, None] * (jax.lax.stop_gradient(x) @ d[a]) @ u[a],
        "layers below",
    ),
    "8 taken after the scale": (lora.check_dequantized, partial(blocks, way="minus last"), "the 8 or the scale"),
    "divided by the scale": (lora.check_dequantized, partial(blocks, way="divided"), "the 8 or the scale"),
    "shifted as a signed byte": (lora.check_dequantized, partial(blocks, way="a signed byte"), "a byte holds two"),
    "computed in float16": (lora.check_dequantized, partial(blocks, way="float16"), "compute in float32"),
    "the scale rounded first": (lora.check_dequantized, partial(blocks, way="the scale rounded"), "rounded twice"),
    "column by column": (lora.check_dequantized, partial(blocks, way="columns"), "its own scale"),
    "block by block in Python": (lora.check_dequantized, block_by_block, "leaves every turn in it"),
    "row by row in Python": (lora.check_dequantized, row_by_row, "leaves every turn in it"),
    "adapters that never learn, down": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: x @ w + s[a][:, None, None] * (jax.lax.stop_gradient(x @ d[a]) @ u[a]),
        "gradient of down_ADR is not",
    ),
    "sequence by sequence": (lora.check_adapted, sequence_by_sequence, "once for all"),
    "a loop over sequences": (lora.check_adapted, sequences_in_a_loop, "once for all"),
    "token by token": (lora.check_adapted, token_by_token, "once for all"),
    "the thin products in a Python loop": (lora.check_adapted, thin_products_in_a_loop, "as Python's loops do"),
    "number by number": (lora.check_dequantized, number_by_number, "inside `jit`"),
    "in NumPy": (lora.check_dequantized, in_numpy, "inside `jit`"),
    "one gather for each token": (lora.check_adapted, by_token, "you merge weights"),
    "merged in a loop": (lora.check_adapted, merged_in_a_loop, "one by one|you merge weights"),
    "nothing for the layers below": (
        lora.check_adapted,
        lambda x, w, *rest: jax.lax.stop_gradient(x @ w) + adapted(x, w, *rest) - x @ w,
        "layers below|FLOPs",
    ),
    "adapters that never learn": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, jax.lax.stop_gradient(d), u, s, a),
        "what a fine-tune trains",
    ),
    "every token times its adapter": (
        lora.check_adapted,
        lambda x, w, d, u, s, a: x @ w + s[a][:, None, None] * ((x[..., None] * d[a][:, None]).sum(2) @ u[a]),
        "an array of 1440 numbers",
    ),
    "no sign": (lora.check_dequantized, partial(blocks, minus=0), "two signs"),
    "the middle as zero": (lora.check_dequantized, partial(blocks, minus=7.5), "off by 0.5 scales"),
    "two's complement": (lora.check_dequantized, partial(blocks, way="signed"), "off by 8 scales"),
    "below zero in uint8": (lora.check_dequantized, partial(blocks, way="uint8"), "take 8 from 3"),
    "no block's scale": (lora.check_dequantized, lambda v, s, t: blocks(v, 0 * s + 1, t), "a block bring along"),
    "the row's first scale": (lora.check_dequantized, lambda v, s, t: blocks(v, 0 * s + s[:, :1], t), "its own scale"),
    "bytes as numbers": (lora.check_dequantized, lambda v, s, t: blocks(v, s, t, low=255), "two numbers"),
    "neighbours in a byte": (lora.check_dequantized, partial(blocks, way="stack"), "16 further on"),
    "halves of the row": (lora.check_dequantized, partial(blocks, way="halves"), "which axis"),
    "high bits first": (lora.check_dequantized, partial(blocks, way="high"), "another order"),
    "computed in the type": (lora.check_dequantized, partial(blocks, way="early"), "rounded twice"),
    "always float32": (lora.check_dequantized, lambda v, s, t: blocks(v, s, jnp.float32), "asked for bfloat16"),
    "one scale for all": (lora.check_dequantized, lambda v, s, t: blocks(v, 0 * s + s[0, 0], t), "its own scale"),
    "blocks left apart": (lora.check_dequantized, lambda v, s, t: blocks(v, s, t).reshape(len(v), -1, 32), "a row of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_with_its_hint(name):
    refuse(WRONG[name], "einsum", "softmax", "maximum(")


def by_groups(x, w, down, up, scale, adapter):
    order = jnp.argsort(adapter)
    sizes = jnp.bincount(adapter, length=len(scale)) * x.shape[1]
    rows = x[order].reshape(-1, x.shape[2])
    z = jax.lax.ragged_dot(rows, down, sizes)
    delta = jax.lax.ragged_dot(z, up, sizes).reshape(*x.shape[:2], -1) * scale[adapter[order]][:, None, None]
    return x @ w + jnp.zeros_like(delta).at[order].set(delta)


def side_by_side(x, w, down, up, scale, adapter):
    return jax.vmap(lambda x_TD, a: x_TD @ w + scale[a] * (x_TD @ down[a]) @ up[a])(x, adapter)


def thin_products_in_a_scan(x, w, down, up, scale, adapter):
    return x @ w + jax.lax.map(lambda one: scale[one[1]] * (one[0] @ down[one[1]]) @ up[one[1]], (x, adapter))


def rows_in_a_map(values, scale, dtype):
    return jax.lax.map(lambda one: blocks(one[0][None], one[1][None], dtype)[0], (values, scale))


def merged_column_by_column(w, down, up, scale):
    columns = jax.vmap(lambda column_D, up_R: column_D.astype(jnp.float32) + scale * (down @ up_R))
    return columns(w.T, up.T).T.astype(w.dtype)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lora.check_merged_weight, merged_weight),
        (lora.check_merged_weight, merged_column_by_column),
        (lora.check_adapted, adapted),
        (lora.check_adapted, thin_products_in_a_scan),
        (lora.check_adapted, side_by_side),
        (lora.check_adapted, by_groups),
        (lora.check_dequantized, blocks),
        (lora.check_dequantized, rows_in_a_map),
    ],
)
def test_a_right_answer_is_accepted(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out
