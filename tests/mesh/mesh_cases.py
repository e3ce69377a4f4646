"""Training steps on eight simulated CPU devices, each against the float64 reference; what was seen, as JSON.

Run as `python mesh_cases.py quick|others`: a process of its own, since a process has as many devices as
it began with.
"""

import contextlib
import json
import sys
import tempfile
import unittest.mock
from functools import partial
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402
import reference  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from norms import errors_by_name  # noqa: E402
from stopping import stopped_after  # noqa: E402

from jaxmem.compiling import matmul_flops  # noqa: E402
from jaxmem.reading.hlo import (  # noqa: E402
    compiled_matmul_flops,
    optimised_text,
    parse,
)
from llamem import LlamaConfig, Plan, TrainSettings, generate  # noqa: E402
from llamem.layers.attention import causal_attention  # noqa: E402
from llamem.llama import MeshShape  # noqa: E402
from llamem.mesh.mesh_step import (  # noqa: E402
    OnMesh,
    batch_spec,
    on_mesh,
)
from llamem.mesh.specs import parameter_specs, shardings  # noqa: E402
from llamem.mesh.split_weights import context_attention, local_positions  # noqa: E402
from llamem.runs.loop import train  # noqa: E402
from llamem.runs.step_of_plan import loss_fn, place_of  # noqa: E402
from llamem.train.data import Corpus  # noqa: E402
from llamem.train.optimizers import make_optimizer, make_update, split_counters  # noqa: E402
from llamem.train.plain_step import make_model, weights_loss_and_grads  # noqa: E402

B, T, L, TILES = 8, 48, 2, 5
# 324 rows in tiles, on one device, two or four: the last tile is shorter. Every mesh below divides every size.
CONFIG = LlamaConfig(
    vocab_size=324, d_model=48, n_layers=L, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=80, max_seq_len=64, qk_norm=True
)
MESHES = {
    "DP": {"data": 8},
    "FSDP": {"fsdp": 8},
    "TP": {"tensor": 2},
    "CP": {"context": 4},
    "FSDP CP": {"fsdp": 4, "context": 2},
    "DP CP": {"data": 2, "context": 4},
    "FSDP TP CP": {"fsdp": 2, "tensor": 2, "context": 2},
    "DP FSDP TP": {"data": 2, "fsdp": 2, "tensor": 2},
}


def quick_cases():
    """One of each kind of parallelism and all but one at once; other ways to compute the same, each of them once."""
    yield {"name": "DP", "mesh": MESHES["DP"], "tied": True, "axis": "vocab", "mode": "unroll"}
    yield {"name": "FSDP", "mesh": MESHES["FSDP"], "tied": False, "axis": "tokens"}
    yield {"name": "TP", "mesh": MESHES["TP"], "tied": True, "axis": "vocab", "remat": "attn", "mlp_tiles": 5}
    yield {"name": "CP", "mesh": MESHES["CP"], "tied": False, "axis": "tokens"}
    yield {"name": "FSDP TP CP", "mesh": MESHES["FSDP TP CP"], "tied": True, "axis": "vocab", "accumulate": 2}
    # As on slices of TPUs with two sides, and with three.
    yield {"name": "FSDP 2 x 4", "mesh": MESHES["FSDP"], "tied": False, "axis": "tokens", "slice": (2, 4)}
    yield {"name": "FSDP 2 x 2 x 2", "mesh": MESHES["FSDP"], "tied": True, "axis": "vocab", "slice": (2, 2, 2)}
    yield {"name": "FSDP CP 2 x 4", "mesh": MESHES["FSDP CP"], "tied": False, "axis": "tokens", "slice": (2, 4)}


def other_cases():
    """All but context parallelism at once, and the ways to rematerialise that the quick cases leave out."""
    yield {"name": "DP FSDP TP", "mesh": MESHES["DP FSDP TP"], "tied": False, "axis": "vocab", "remat": None}
    yield {"name": "DP CP", "mesh": MESHES["DP CP"], "tied": True, "axis": "vocab", "mode": "nested"}


def batch_of(config, seed=1):
    return tuple(np.asarray(models.tokens_of(config, T, B, seed + i)) for i in range(2))


def float64_reference(config):
    model = models.model_of(config, scale=1.0)
    grad = jax.value_and_grad(reference.loss, argnums=1)
    loss, grads = models.in_float64(
        lambda *args: jax.jit(grad, static_argnums=0)(*args), config, model, *batch_of(config)
    )
    return nnx.state(model, nnx.Param), float(loss), jax.tree.map(np.asarray, grads)


def compiled_gradients(config, settings, plan, params):
    """The program that gives loss and gradients, and its arguments as they lie."""
    mesh = plan.mesh
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, settings, plan)))
    specs = parameter_specs(params, mesh)
    fn = partial(weights_loss_and_grads, graphdef, settings, place_of(plan))
    fn = on_mesh(fn, mesh, (specs, batch_spec(mesh)), (PartitionSpec(), specs))
    args = (params, batch_of(config))
    if mesh.devices > 1:
        args = jax.device_put(args, (shardings(specs, mesh), shardings(batch_spec(mesh), mesh)))
    # Half the time to compile, and the same products and messages.
    return jax.jit(fn).lower(*args).compile(compiler_options={"xla_backend_optimization_level": "0"}), args


def traced_products(config, axis, **plan):
    """Of one device: what the devices of a mesh have to share out."""
    settings = TrainSettings(batch_size=B, seq_len=T)
    model = nnx.eval_shape(lambda: make_model(config, settings, Plan(loss_tiles=TILES, loss_axis=axis, **plan)))
    grad = jax.value_and_grad(partial(loss_fn, nnx.graphdef(model)))
    return matmul_flops(jax.make_jaxpr(grad)(nnx.state(model, nnx.Param), *batch_of(config)).jaxpr)


def message_runs(program):
    """How often each collective of an optimised program runs, by kind; and how often its loops run their bodies."""
    assert program.executions is not None, "a loop does not say how often it runs"
    runs = {}
    for computation, instructions in program.computations.items():
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
                runs.setdefault(kind, []).append(program.executions[computation])
    return runs, sorted(set(program.executions.values()))


def check_gradient_outside(sizes, expected):
    """The gradients of `loss_fn`, taken outside of `shard_map`."""
    params, _, grads = expected
    settings, plan = TrainSettings(batch_size=B, seq_len=T), Plan(mesh=sizes, loss_tiles=TILES)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(CONFIG, settings, plan)))
    got = jax.jit(jax.grad(partial(loss_fn, graphdef)))(params, *batch_of(CONFIG))
    return errors_by_name(nnx.to_pure_dict(got), grads)


@contextlib.contextmanager
def devices_in(sides):
    """As if the devices of every mesh stood in a slice of TPUs with these sides, in the mesh's own order."""

    def places(mesh):
        return np.array(list(np.ndindex(*sides))).reshape(*mesh.axes.values(), len(sides)) if sides else None

    with (
        unittest.mock.patch("llamem.mesh.torus._places", places),
        unittest.mock.patch("llamem.mesh.torus._as_rings", lambda lengths: lengths),
    ):
        yield


def check(case, expected):
    case = dict(case)
    with devices_in(case.pop("slice", ())):
        return check_on(case, expected)


def check_on(case, expected):
    name, sizes, tied, axis = (case.pop(key) for key in ("name", "mesh", "tied", "axis"))
    config = CONFIG.replace(tied_head=tied)
    accumulate = case.pop("accumulate", 1)
    settings = TrainSettings(batch_size=B, seq_len=T, accumulate=accumulate)
    loss_axis = "auto" if "tensor" in sizes else axis
    plan = Plan(mesh=sizes, loss_tiles=TILES, loss_axis=loss_axis, **case)
    params, loss, grads = expected
    program, args = compiled_gradients(config, settings, plan, params)
    got_loss, got = program(*args)
    compiled = parse(optimised_text(program))
    share = traced_products(config, "vocab" if "tensor" in sizes else axis, **case) / MeshShape.of(sizes).devices
    runs, trips = message_runs(compiled)
    return {
        "name": name,
        "way": {"tied": tied, "axis": axis, **case},
        "accumulate": accumulate,
        "loss error": abs(float(got_loss) - loss) / loss,
        "gradient errors": errors_by_name(nnx.to_pure_dict(got), grads),
        "products of share": (compiled_matmul_flops(compiled) or 0) / share,
        "message runs": runs,
        "loop trips": trips,
    }


def check_run():
    """Trained without a mesh, and in two parts on two meshes: the losses; and text out of a model that is spread."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 20 * B * T).astype(np.uint32)
    corpus = Corpus(tokens[: 15 * B * T], tokens[15 * B * T :], 1, CONFIG.vocab_size)
    config = CONFIG.replace(n_layers=1)
    settings = TrainSettings(steps=4, batch_size=B, seq_len=T, eval_every=2, eval_batches=9, clip_norm=0.1)
    runs = {}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        runs["one device"] = train(config, corpus, settings, one, progress=False)
        first = Plan(mesh={"fsdp": 4, "tensor": 2})
        with stopped_after(2):
            train(config, corpus, settings, two, plan=first, progress=False)
        runs["two meshes"] = train(
            config, corpus, settings, two, plan=Plan(mesh={"fsdp": 2, "context": 2}), progress=False
        )
    prompt = jnp.asarray(batch_of(config)[0][:, :5])
    texts = [np.asarray(generate(run.model, prompt, 4, temperature=0)).tolist() for run in runs.values()]
    held = [leaf.addressable_shards[0].data.size / leaf.size for leaf in (runs["two meshes"].model.embedding[...],)]
    losses = {
        name: [[row["loss"], row["grad_norm"], row.get("val_loss")] for row in run.metrics]
        for name, run in runs.items()
    }
    return {"losses": losses, "texts": texts, "held": held[0]}


def check_rounding():
    """Which share of bf16 weights a mesh rounds otherwise than one device, and which a rounding to the nearest."""
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(models.model_of(CONFIG), nnx.Param))

    def updated(mesh, **how):
        settings = TrainSettings(steps=9, warmup_steps=0, **how)
        state = make_optimizer(settings).init(params)

        def update(params, state):  # by gradients that are the weights themselves
            counters, moments = split_counters(state)
            rule = make_update(settings, jnp.int32(3), counters, OnMesh(Plan(mesh=mesh)).start_of_part)
            return rule(params, moments, params)[0]

        specs = parameter_specs(params, mesh), parameter_specs(state, mesh)
        return jax.jit(on_mesh(update, mesh, specs, specs[0]))(params, state)

    def share_of_others(one, two):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
        return float(np.mean(np.concatenate([np.ravel(a != b) for a, b in pairs])))

    alone, nearest = updated(MeshShape()), updated(MeshShape(), rounding="nearest")
    shared = updated(MeshShape.of(MESHES["FSDP TP CP"]))
    return {"mesh": share_of_others(shared, alone), "nearest": share_of_others(nearest, alone)}


def check_attention(implementation):
    """Two devices share a sequence whose tiles do not divide: how far value and gradients are from one device's."""
    length, heads, size = (512, 2, 128) if implementation == "splash" else (1536, 2, 8)
    keys = jax.random.split(jax.random.key(0), 4)
    q, weights = (jax.random.normal(key, (1, length, heads, size)) for key in keys[:2])
    k, v = (jax.random.normal(key, (1, length, 1, size)) for key in keys[2:])

    def one(q, k, v):
        return jnp.sum(weights * causal_attention(q, k, v, implementation="xla"))

    def part(q, k, v):
        places = local_positions(length, "context")
        mine = [a[:, places] for a in (q, k, v)]
        out = context_attention(*mine, axis="context", implementation=implementation)
        return jnp.sum(weights[:, places] * out)

    def grads(q, k, v):
        value, grads = jax.value_and_grad(part, argnums=(0, 1, 2))(q, k, v)
        return jax.lax.psum((value, grads), "context")

    many = on_mesh(grads, MeshShape(context=2), PartitionSpec(), PartitionSpec())
    seen = jax.jit(many)(q, k, v)
    wanted = jax.jit(jax.value_and_grad(one, argnums=(0, 1, 2)))(q, k, v)
    error = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), seen, wanted)
    return jax.tree.leaves(error)


def tiled_products_of_share():
    """Of tiled attention on one of four devices, against a fourth of one device's: with the mask, not of all pairs."""
    q, k = jax.ShapeDtypeStruct((1, 8192, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)

    def part(q, k, v):
        places = local_positions(8192, "context")
        return context_attention(q[:, places], k[:, places], v[:, places], axis="context", implementation="tiled")

    one = partial(causal_attention, implementation="tiled")
    many = on_mesh(part, MeshShape(context=4), PartitionSpec(), PartitionSpec(None, "context"))
    share, own = (matmul_flops(jax.make_jaxpr(fn)(q, k, k).jaxpr) for fn in (one, many))
    return own / share


@contextlib.contextmanager
def interpreted_splash():
    """JAX's kernel for TPUs on a CPU, with blocks of 128 tokens."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    make = partial(kernels.make_splash_mha, interpret=True)
    with (
        unittest.mock.patch.object(kernels, "make_splash_mha", make),
        unittest.mock.patch("llamem.layers.attention_splash.SPLASH_BLOCK", 128),
        unittest.mock.patch("llamem.layers.attention_splash.compiling_for", lambda: "TPU"),
    ):
        yield


def main(which: str) -> None:
    expected = {tied: float64_reference(CONFIG.replace(tied_head=tied)) for tied in (False, True)}
    answer: dict[str, Any] = {"layers": L}
    if which == "others":
        answer["cases"] = [check(case, expected[bool(case["tied"])]) for case in other_cases()]
        answer["run"] = check_run()
        with interpreted_splash():
            answer["splash"] = check_attention("splash")
    else:
        answer["cases"] = [check(case, expected[bool(case["tied"])]) for case in quick_cases()]
        answer["rounding"] = check_rounding()
        answer["outside"] = check_gradient_outside(MESHES["FSDP TP CP"], expected[False])
        answer["tiled"], answer["tiled products of share"] = check_attention("tiled"), tiled_products_of_share()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
