"""What arguments are for, told by where they go: of programs whose names say nothing, and of what compilers make."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
import llamem
from jaxmem.chips.names import find_chip
from jaxmem.reading.provenance import find_provenance
from jaxmem.reading.timeline import Timeline
from jaxmem.tracing.arguments import read_leaves

N, D, V, L = 96, 40, 1200, 3  # tokens, width, vocabulary, layers
TX = optax.adamw(1e-3)


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


MODEL = {"e": shape(V, D), "s": (shape(L, D, 2 * D), shape(L, 2 * D, D)), "h": shape(D, V)}
TOKENS, LONGER = shape(4, N // 4, dtype="int32"), shape(4, N // 4 + 1, dtype="int32")


def logits(a, t, dtype="bfloat16"):
    """A stack under remat whose weights are cast, and a head: [4, N // 4, V]."""

    def layer(x, w):
        up, down = (one.astype(dtype) for one in w)
        attention = jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2)) @ x  # searched, too, and no product with weights
        return x + jnp.tanh(attention @ up) @ down, None

    x = jax.lax.scan(jax.checkpoint(layer), a["e"][t].astype(dtype), a["s"])[0]
    return (x @ a["h"].astype(dtype)).astype("float32")


def loss(a, t, u):
    return optax.softmax_cross_entropy_with_integer_labels(logits(a, t), u).mean()


def update(a, m, gradients):
    changes, m = TX.update(gradients, m, a)
    return optax.apply_updates(a, changes), m


def whole(s, z):
    """A state that is one tuple of weights and moments, and a batch that is sliced outside of the loss."""
    gradients = jax.grad(lambda a: loss(a, z[:, :-1], z[:, 1:]))(s[0])
    return update(s[0], s[1], gradients)


def adapted(frozen, s, z):
    """Adapters of a base that is donated, too, and comes back as it was."""

    def adapted_loss(a):
        stack = tuple(w + b @ c for w, (b, c) in zip(frozen["s"], a, strict=True))
        return loss(frozen | {"s": stack}, z[0], z[1])

    return frozen, update(s[0], s[1], jax.grad(adapted_loss)(s[0]))


def tiled(a, z):
    """One sequence after the other, by a function of its own."""
    of_one = jax.jit(lambda a, t, u: loss(a, t[None], u[None]))
    return jax.grad(lambda a: jnp.mean(jax.lax.map(lambda one: of_one(a, *one), z)))(a)


def regression(a, z):
    return jax.value_and_grad(lambda a: jnp.mean(jnp.tanh(z @ a) ** 2))(a)


def adapted_by_two(rest, s, z):
    """Adapters of a base of two arrays, in an argument whose name says nothing."""
    base = {"e": rest[0], "s": tuple(jnp.zeros((L, *one)) for one in ((D, 2 * D), (2 * D, D))), "h": rest[1]}
    return adapted(base, s, z)[1]


def distilled(s, teacher, t):
    """A teacher's logits for each of four parts of a batch."""

    def loss(a):
        return -jnp.mean(jax.nn.softmax(jnp.stack(teacher)) * jax.nn.log_softmax(logits(a, t)))

    return update(s[0], s[1], jax.grad(loss)(s[0]))


def carried(s, h, z):
    """A recurrence over a part of a text: its state comes back for the next part."""

    def loss(a):
        last, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ a["h"] + x @ a["x"]), None), h, z)
        return jnp.mean(last**2), last

    gradients, h = jax.grad(loss, has_aux=True)(s[0])
    return update(s[0], s[1], gradients), h


def perceived(a, net, pictures):
    """A frozen network of two products judges what another makes of numbers."""

    def judged(x):
        return jnp.tanh(x @ net[0]) @ net[1]

    return jax.grad(lambda a: jnp.mean((judged(jnp.tanh(pictures @ a)) - judged(pictures)) ** 2))(a)


RECURRENT = {"h": shape(D, D), "x": shape(30, D)}
ADAPTERS = tuple((shape(L, i, 2), shape(L, 2, o)) for i, o in ((D, 2 * D), (2 * D, D)))
STATE, FEW, ROLLED = ((w, jax.eval_shape(TX.init, w)) for w in (MODEL, ADAPTERS, RECURRENT))
STUDENT = {"s[0]": "weights", "s[1]": "optimizer"}


@pytest.mark.parametrize(
    ("fn", "args", "expected", "sizes"),
    [
        (
            whole,
            (STATE, shape(4, N // 4 + 1, dtype="int32")),
            {"s[0]": "weights", "s[1]": "optimizer", "z": "batch"},
            N,
        ),
        (
            adapted,
            (MODEL, FEW, (TOKENS, TOKENS)),
            {"frozen": "weights", "s[0]": "weights", "s[1]": "optimizer", "z": "batch"},
            N,
        ),
        (lambda a, z: logits(a, z), (MODEL, TOKENS), {"a": "weights", "z": "batch"}, 0),
        (tiled, (MODEL, (TOKENS, TOKENS)), {"a": "weights", "z": "batch"}, N // 4),
        (regression, (shape(D, D), shape(N, D)), {"a": "weights", "z": "batch"}, 0),
        (
            adapted_by_two,
            ((shape(V, D), shape(D, V)), FEW, (TOKENS, TOKENS)),
            STUDENT | {"rest": "weights", "z": "batch"},
            N,
        ),
        (distilled, (STATE, (shape(N // 4, V),) * 4, TOKENS), STUDENT | {"teacher": "batch", "t": "batch"}, N),
        (carried, (ROLLED, shape(7, D), shape(5, 7, 30)), STUDENT | {"h": "other", "z": "batch"}, 0),
        (
            perceived,
            (shape(D, D), (shape(D, 70), shape(70, 9)), shape(N, D)),
            {"a": "weights", "net": "weights", "pictures": "batch"},
            0,
        ),
    ],
    ids=[
        *("a tuple of both", "a frozen base", "no gradient", "tiles in a loop", "numbers for a batch"),
        *("a base of two arrays", "a teacher's logits", "a carried state", "a frozen judge"),
    ],
)
def test_arguments_are_told_by_where_they_go(fn, args, expected, sizes):
    leaves = read_leaves(fn, args, (), find_chip("local"))
    found = find_provenance(jax.make_jaxpr(fn)(*args), leaves)
    assert len(found.categories) == len(leaves)
    for leaf, category in zip(leaves, found.categories, strict=True):
        assert category == next(kind for name, kind in expected.items() if leaf.name.startswith(name)), leaf.name
    assert found.logits == ({(sizes * V, V)} if sizes else set())


def test_a_timeline_calls_the_users_logits_and_cast_weights_so():
    report = jaxmem.compile_report(whole, STATE, LONGER, donate_argnums=(0,))
    timeline = report.timeline
    if timeline is None:
        pytest.skip(report.no_timeline)
    assert_logits(timeline, N, V)
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(STATE[1]))
    assert max(timeline.by_category()["optimizer"]) == held
    # In bf16 the weights are a second time in memory, for the products.
    casts = {b.shape for b in timeline.buffers if b.category == "weights" and b.made_in}
    assert f"bf16[{D},{V}]" in casts or f"f32[{D},{V}]" in casts


def assert_logits(timeline: Timeline, rows: int, columns: int) -> None:
    """Every array of this size that the program makes is called logits, but for results."""
    sizes = {b: [int(size) for size in re.findall(r"\d+", b.shape.partition("[")[2])] for b in timeline.buffers}
    found = [b for b, own in sizes.items() if b.made_in and columns in own and math.prod(own) == rows * columns]
    assert found and {b.category for b in found} <= {"logits", "gradients", "output"}, found


@pytest.mark.parametrize(
    "chip", [pytest.param("v5e-1", marks=pytest.mark.tpu_compile), pytest.param("h100", marks=pytest.mark.gpu_compile)]
)
def test_logits_of_a_tiled_loss_are_logits_on_every_chip(chip):
    if not jaxmem.available(chip):
        pytest.skip(f"no compiler for {chip} here")

    def tiled(w, h, y):
        return jax.grad(lambda w, h: llamem.tiled_cross_entropy(h, w, y, num_tiles=4, axis="tokens"), (0, 1))(w, h)

    arrays = shape(32_000, 512, dtype="bfloat16"), shape(4096, 512, dtype="bfloat16"), shape(4096, dtype="int32")
    timeline = jaxmem.compile_report(tiled, *arrays, chip=chip).timeline
    assert timeline is not None
    assert_logits(timeline, 1024, 32_000)
    assert timeline.by_category()["logits"][timeline.peak_step] >= 4 * 1024 * 32_000
