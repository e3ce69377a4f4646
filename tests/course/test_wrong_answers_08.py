"""Answers that a reader may well give to the exercises of notebook 08, and that are wrong: each is rejected."""

import jax
import jax.numpy as jnp
import pytest
from answers import Answers, refuse

import llamem
from llamem import Plan
from llamem_course.exercises import long_context


def one_tile(w, x_TD):
    return (jax.nn.silu(x_TD @ w["gate"]) * (x_TD @ w["up"])) @ w["down"]


def rows_of(x_ND, tiles):
    return x_ND.reshape(tiles, -1, x_ND.shape[-1])


def without_checkpoint(w, x_ND, tiles):
    return jax.lax.map(lambda x: one_tile(w, x), rows_of(x_ND, tiles)).reshape(x_ND.shape)


def narrow_sum(w, x_ND, tiles):
    return jax.lax.map(jax.checkpoint(lambda x: one_tile(w, x)), rows_of(x_ND, tiles)).reshape(x_ND.shape)


def by_rows(w, x_ND, tiles):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    tile = jax.checkpoint(lambda x: one_tile({name: a.astype(x.dtype) for name, a in wide.items()}, x))
    return jax.lax.map(tile, rows_of(x_ND, tiles)).reshape(x_ND.shape)


def written_out(w, x_ND, tiles):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    tile = jax.checkpoint(lambda x: one_tile({name: a.astype(x.dtype) for name, a in wide.items()}, x))
    return jnp.concatenate([tile(x) for x in rows_of(x_ND, tiles)])


def gate_and_up_of_all_rows(w, x_ND, tiles):
    both = jnp.concatenate([w["gate"], w["up"]], axis=1)

    def tile(rows):
        gate, up = jnp.split(rows, 2, axis=1)
        return (jax.nn.silu(gate) * up) @ w["down"]

    return jax.lax.map(jax.checkpoint(tile), rows_of(x_ND @ both, tiles)).reshape(x_ND.shape)


def unrolled(w, x_ND, tiles):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    tile = jax.checkpoint(lambda x: one_tile({name: a.astype(x.dtype) for name, a in wide.items()}, x))
    body = lambda _, x: (None, tile(x))  # noqa: E731
    return jax.lax.scan(body, None, rows_of(x_ND, tiles), unroll=tiles)[1].reshape(x_ND.shape)


def wide_tile(w):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    return jax.checkpoint(lambda x: one_tile({name: a.astype(x.dtype) for name, a in wide.items()}, x))


def two_in_a_turn(w, x_ND, tiles):
    tile = wide_tile(w)
    pairs = rows_of(x_ND, tiles).reshape(tiles // 2, 2, -1, x_ND.shape[1])
    return jax.lax.map(lambda pair: jnp.stack([tile(pair[0]), tile(pair[1])]), pairs).reshape(x_ND.shape)


def two_loops(w, x_ND, tiles):
    return jnp.concatenate([by_rows(w, half, tiles // 2) for half in jnp.split(x_ND, 2)])


def products_in_f32(w, x_ND, tiles):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    tile = jax.checkpoint(lambda x: one_tile(wide, x.astype(jnp.float32)).astype(x.dtype))
    return jax.lax.map(tile, rows_of(x_ND, tiles)).reshape(x_ND.shape)


def wide_inside_the_tile(w, x_ND, tiles):
    tile = lambda x: one_tile({name: a.astype(jnp.float32).astype(x.dtype) for name, a in w.items()}, x)  # noqa: E731
    return jax.lax.map(jax.checkpoint(tile), rows_of(x_ND, tiles)).reshape(x_ND.shape)


def one_matrix_wide(w, x_ND, tiles):
    down = w["down"].astype(jnp.float32)
    tile = lambda x: one_tile(w | {"down": down.astype(x.dtype)}, x)  # noqa: E731
    return jax.lax.map(jax.checkpoint(tile), rows_of(x_ND, tiles)).reshape(x_ND.shape)


def every_tiles_th_row(w, x_ND, tiles):
    rows = x_ND.reshape(-1, tiles, x_ND.shape[1]).swapaxes(0, 1)
    return jax.lax.map(wide_tile(w), rows).reshape(x_ND.shape)


def in_f32(w, x_ND, tiles):
    return by_rows({k: v.astype(jnp.float32) for k, v in w.items()}, x_ND.astype(jnp.float32), tiles)


def of_weights_in_their_type(config, tokens, plan):
    return lines(config, tokens, plan, size=config.param_dtype.itemsize)


def inputs_alone_on_the_host(config, tokens, plan):
    return lines(config, tokens, plan, offload=plan.offload == ("block_in",))


def any_name_on_the_host(config, tokens, plan):
    found = lines(config, tokens, plan)
    return found | ({"residuals": 0} if plan.offload else {})


def no_gate(w, x_ND, tiles):
    return jax.lax.map(jax.checkpoint(lambda x: jax.nn.silu(x @ w["up"]) @ w["down"]), rows_of(x_ND, tiles)).reshape(
        x_ND.shape
    )


def checkpoint_around_the_loop(w, x_ND, tiles):
    return jax.checkpoint(lambda w, x: without_checkpoint(w, x, tiles))(w, x_ND)


def all_in_f32(w, x_ND, tiles):
    return one_tile({k: v.astype(jnp.float32) for k, v in w.items()}, x_ND.astype(jnp.float32))


def lines(
    config,
    tokens,
    plan,
    *,
    size=None,
    layers=None,
    at_work=1,
    offload=True,
    tiles=None,
    arrays=3,
    sums=lambda D, F, tiles: 12 * D * F if tiles > 1 else 0,
):
    """The right lines, but for what is named."""
    size, D, F = size or config.compute_dtype.itemsize, config.d_model, config.d_ff
    inputs = 0 if offload and "block_in" in plan.offload else (layers or config.n_layers) * tokens * D * size
    tile = arrays * (tokens // (tiles or plan.mlp_tiles)) * F * size
    return {"residuals": inputs, "feed-forward": at_work * (tile + sums(D, F, plan.mlp_tiles))}


def but(**mistake):
    return lambda config, tokens, plan: lines(config, tokens, plan, **mistake)


LEDGER, ROWS, BETTER = (
    long_context.check_ledger_lines,
    long_context.check_feed_forward,
    long_context.check_better_plan,
)
WRONG: Answers = {
    "one byte a number": (LEDGER, but(size=1), "How many bytes"),
    "always 16 bits": (LEDGER, but(size=2), "float32, 4,096 tokens.*How many bytes"),
    "the weights' type": (LEDGER, of_weights_in_their_type, "How many bytes"),
    "inputs on the host alone": (LEDGER, inputs_alone_on_the_host, "Where do the inputs wait"),
    "the input in transit": (
        LEDGER,
        lambda c, n, p: lines(c, n, p) | ({"residuals": 2 * n * c.d_model} if "block_in" in p.offload else {}),
        "in transit",
    ),
    "one layer's input": (LEDGER, but(layers=1), "How many layers leave"),
    "still on the chip": (LEDGER, but(offload=False), "Where do the inputs wait"),
    "every layer at work": (LEDGER, but(at_work=16), "at work at one moment"),
    "gate and up alone": (LEDGER, but(arrays=2), "has a third"),
    "all rows together": (LEDGER, but(tiles=1), "exist together"),
    "all rows together, and no sums": (LEDGER, but(tiles=1, sums=lambda D, F, tiles: 0), "exist together"),
    "no sums": (LEDGER, but(sums=lambda D, F, tiles: 0), "what is added up"),
    "sums in bfloat16": (LEDGER, but(sums=lambda D, F, tiles: 6 * D * F if tiles > 1 else 0), "lose bits"),
    "one matrix": (LEDGER, but(sums=lambda D, F, tiles: 4 * D * F if tiles > 1 else 0), "How many matrices"),
    "a sum for each tile": (LEDGER, but(sums=lambda D, F, tiles: 12 * D * F // tiles if tiles > 1 else 0), "smaller"),
    "sums without tiles": (LEDGER, but(sums=lambda D, F, tiles: 12 * D * F), "what is there to add up"),
    "two matrices": (LEDGER, but(sums=lambda D, F, tiles: 8 * D * F if tiles > 1 else 0), "How many matrices"),
    "sixteen layers, whatever the model": (LEDGER, but(layers=16), "32 layers.*How many layers has this"),
    "the embedding's output as well": (LEDGER, but(layers=17), "at this moment"),
    "a gradient for gate and for up": (LEDGER, but(arrays=4), "at this moment"),
    "sums of all layers": (
        LEDGER,
        but(sums=lambda D, F, tiles: 16 * 12 * D * F if tiles > 1 else 0),
        "feed-forward: yours.*at this moment",
    ),
    "two numbers": (LEDGER, lambda *given: tuple(lines(*given).values()), "a dictionary"),
    "nothing tiled": (ROWS, lambda w, x, tiles: one_tile(w, x), "2048 x 96 numbers"),
    "all at once in f32": (ROWS, all_in_f32, "2048 x 96 numbers"),
    "tiles without a checkpoint": (ROWS, without_checkpoint, "2048 x 96 numbers"),
    "a checkpoint around the loop": (ROWS, checkpoint_around_the_loop, "2048 x 96 numbers"),
    "gate and up of all rows in one product": (ROWS, gate_and_up_of_all_rows, "2048 x 96 numbers, or more"),
    "a scan that is unrolled": (ROWS, unrolled, "is unrolled"),
    "tiles in f32, and a result too": (ROWS, in_f32, "the result is float32"),
    "half as many tiles": (ROWS, lambda w, x, tiles: by_rows(w, x, tiles // 2), "How many rows"),
    "no gradient for x": (ROWS, lambda w, x, n: by_rows(w, jax.lax.stop_gradient(x), n), "no gradient of x"),
    "rows summed in bfloat16": (ROWS, narrow_sum, "In which type is the sum"),
    "always two tiles": (ROWS, lambda w, x, tiles: by_rows(w, x, 2), "How many rows"),
    "always 16 tiles": (ROWS, lambda w, x, tiles: by_rows(w, x, 16), "How many rows"),
    "one row at a time": (ROWS, lambda w, x, tiles: by_rows(w, x, len(x)), "How many rows"),
    "two tiles in a turn": (ROWS, two_in_a_turn, "exist together"),
    "two loops": (ROWS, two_loops, "turns 64 times"),
    "tiles in batches of two": (
        ROWS,
        lambda w, x, n: jax.lax.map(wide_tile(w), rows_of(x, n), batch_size=2).reshape(x.shape),
        "How many rows",
    ),
    "all tiles side by side": (
        ROWS,
        lambda w, x, n: jax.vmap(wide_tile(w))(rows_of(x, n)).reshape(x.shape),
        "2048 x 96 numbers",
    ),
    "products in float32": (ROWS, products_in_f32, "inside of a tile"),
    "wide inside of the tile": (ROWS, wide_inside_the_tile, "In which type is the sum"),
    "one matrix of three wide": (ROWS, one_matrix_wide, "gradient of (gate|up).*In which type is the sum"),
    "every so-manieth row": (ROWS, every_tiles_th_row, "is not silu"),
    "a Python loop": (ROWS, written_out, "written out"),
    "any name on the host": (LEDGER, any_name_on_the_host, "is the layers' input among them"),
    "in GiB": (LEDGER, lambda c, n, p: {k: v / 2**30 for k, v in lines(c, n, p).items()}, "not in GiB"),
    "never a residual": (LEDGER, lambda c, n, p: lines(c, n, p) | {"residuals": 0}, "Nothing is offloaded"),
    "the estimate asked": (LEDGER, lambda c, n, p: llamem.estimate(c, p, "v5e-1", seq_len=n), "yourself"),
    "the gate left out": (ROWS, no_gate, "is not silu"),
    "rows left in tiles": (ROWS, lambda w, x, tiles: rows_of(x, tiles), "one row for every row"),
    "the defaults": (BETTER, lambda: Plan(), "needs 19.70 of 15.75"),
    "rows alone": (BETTER, lambda: Plan(mlp_tiles=64), "Which tool"),
    "groups of heads alone": (BETTER, lambda: Plan(head_groups=8), "Which tool"),
    "attention's output kept": (BETTER, lambda: Plan(remat="attn", offload=("block_in",)), "Which tool"),
    "plain attention": (BETTER, lambda: Plan(attention="xla", offload=("block_in",)), "'attention'"),
    "eight chips": (BETTER, lambda: Plan(mesh={"fsdp": 8}), "expected a mesh of 1"),
    "only the rows given up": (BETTER, lambda: long_context.GIVEN.replace(mlp_tiles=1), "that you can spare"),
    "the same plan": (BETTER, lambda: long_context.GIVEN, "that is the plan"),
    "everything kept": (BETTER, lambda: Plan(remat=None), "Which tool makes that one smaller"),
    "no plan": (BETTER, lambda: {"mlp_tiles": 4}, "return a llamem.Plan"),
    "a name": (BETTER, lambda: "scan", "return a llamem.Plan"),
    "the plain loss": (BETTER, lambda: Plan(loss_tiles=None), "Which tool"),
    "another maker's kernel": (BETTER, lambda: Plan(attention="cudnn", offload=("block_in",)), "for NVIDIA's GPUs"),
    "streamed, and clipped by all": (BETTER, lambda: Plan(weights="host"), "Choose clip='layer'"),
    "only the groups given up": (BETTER, lambda: long_context.GIVEN.replace(head_groups=1), "that you can spare"),
    "fewer groups": (BETTER, lambda: long_context.GIVEN.replace(head_groups=2, mlp_tiles=4), "that you can spare"),
    "groups and offload": (BETTER, lambda: Plan(head_groups=4, offload=("block_in",)), "that you can spare"),
    "nested, and moments away": (BETTER, lambda: Plan(mode="nested", moments="host"), "that you can spare"),
    "slower still": (BETTER, lambda: long_context.GIVEN.replace(mode="nested"), "that you can spare"),
}


@pytest.mark.parametrize("answer", WRONG)
def test_a_wrong_answer_gets_the_hint_that_fits(answer):
    refuse(WRONG[answer], "3 *", "* 4", "d_model *")


def written_into_one_array(w, x_ND, tiles):
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    tile = jax.checkpoint(lambda x: one_tile({name: a.astype(x.dtype) for name, a in wide.items()}, x))
    rows = rows_of(x_ND, tiles)
    return jax.lax.fori_loop(0, tiles, lambda i, y: y.at[i].set(tile(rows[i])), jnp.zeros_like(rows)).reshape(
        x_ND.shape
    )


def test_right_answers_pass(capsys):
    ROWS(by_rows)
    ROWS(written_into_one_array)
    LEDGER(lines)
    BETTER(lambda: Plan(offload=("block_in",)))
    BETTER(lambda: Plan(offload=("block_in",), moments="host"))
    assert "not yet" not in capsys.readouterr().out
