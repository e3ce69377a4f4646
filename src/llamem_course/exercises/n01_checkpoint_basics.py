"""The exercises of notebook 01."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.compiling import matmul_flops
from jaxmem.tracing.residuals import saved_residuals
from jaxmem.verify.checkpoints import operations
from llamem_course.exercises.exercise import Answer, Exercise, quickly

# Many rows, so that copies of the weights weigh little beside one layer's input.
ROWS, WIDTH = 70, 12
_POLICIES = jax.checkpoint_policies


def sine_layer(w_DD: Any, x_ND: Any) -> Any:
    """Return the layer that stacks apply: one product and two elementwise functions."""
    return jnp.sin(jnp.tanh(x_ND @ w_DD)) + x_ND


def cosine_layer(w_DD: Any, x_ND: Any) -> Any:
    """Return a layer of another function, for answers that know only the first."""
    return jnp.cos(jnp.tanh(x_ND @ w_DD)) - x_ND


def _loop(layer: Answer, w_LDD: Any, x_ND: Any) -> Any:
    for w_DD in w_LDD:
        x_ND = layer(w_DD, x_ND)
    return x_ND


def _scan(layer: Answer, w_LDD: Any, x_ND: Any) -> Any:
    return jax.lax.scan(lambda x_ND, w_DD: (layer(w_DD, x_ND), None), x_ND, w_LDD)[0]


def _groups(group: Answer, w_LDD: Any, x_ND: Any, size: int, **options: Any) -> Any:
    for start in range(0, len(w_LDD), size):
        x_ND = jax.checkpoint(group, **options)(w_LDD[start : start + size], x_ND)
    return x_ND


def _stack_inputs(depth: int) -> tuple[jax.Array, jax.Array]:
    w_LDD = 0.3 * jax.random.normal(jax.random.key(0), (depth, WIDTH, WIDTH))
    return w_LDD, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def _gradients(stack: Answer) -> Answer:
    return jax.value_and_grad(lambda w, x: (stack(w, x) ** 2).sum(), argnums=(0, 1))


def _values(answer: Answer, layer: Answer, depth: int, *size: int) -> Any:
    def stack(w: Any, x: Any) -> Any:
        return answer(layer, w, x, *size)

    w_LDD, x_ND = _stack_inputs(depth)
    got = jax.eval_shape(stack, w_LDD, x_ND)
    assert getattr(got, "shape", None) == x_ND.shape, f"Return the last layer's output, {x_ND.shape}."
    return quickly(_gradients(stack))(w_LDD, x_ND)


class _Looked:
    """What a traced stack keeps, in arrays of the size of x; its products; and the checkpoints around each of them."""

    def __init__(self, answer: Answer, layer: Answer, depth: int, *size: int) -> None:
        w_LDD, x_ND = _stack_inputs(depth)

        def stack(w: Any, x: Any) -> Any:
            return answer(layer, w, x, *size)

        # Slices of the weights are copies, which a loop over layers keeps and a scan does not: not counted here.
        rows = saved_residuals(lambda w, x: stack(w, x).sum(), w_LDD, x_ND).rows
        kept = sum(row.bytes for row in rows if not row.argument and row.shape[-2:] != (WIDTH, WIDTH))
        flops = matmul_flops(jax.make_jaxpr(_gradients(stack))(w_LDD, x_ND).jaxpr)
        self.inputs, self.products = kept / x_ND.nbytes, flops / (2 * ROWS * WIDTH * WIDTH)
        program = list(operations(jax.make_jaxpr(stack)(w_LDD, x_ND).jaxpr))
        self.around = [one.under for one in program if one.eqn.primitive.name == "dot_general"]
        for one in program:
            if one.call is None or one.call.prevent_cse:
                continue
            assert one.times > (one.under[-1].times if one.under else 1), (
                "A checkpoint that stands in no loop of JAX's has prevent_cse=False. What does a compiler do with a "
                "second pass that is a copy of the first, where no barrier stands between them?"
            )


def _last_is_free(depth: int, looked: _Looked) -> bool:
    """Return whether all layers but the last have a checkpoint: it runs backward at once."""
    return looked.products == 4 * depth - 1 and all(looked.around[:-1]) and not looked.around[-1]


def _one_input_each(answer: Answer) -> None:
    depth, looked = 7, _Looked(answer, sine_layer, 7)
    # The first input may be an argument, so that one array less is kept than there are layers.
    told = f"The backward pass keeps {looked.inputs:.1f} arrays of the size of x for {depth} layers"
    if _last_is_free(depth, looked):
        assert looked.inputs < depth + 3, f"{told}: more than the last layer keeps more than its input."
        return
    assert looked.inputs < depth + 0.5, f"{told}. What is the least that a layer must have to run again?"
    assert looked.inputs > depth - 1.5, (
        f"{told}, less than one for each. Then a checkpoint holds several layers, and what they need when it runs them "
        "again comes on top of this. Where must boundaries be to leave one array for each layer?"
    )
    assert looked.products >= 4 * depth, (
        f"{told}, and does {looked.products:.0f} products. A layer that runs twice does four: one forward, the same "
        "again, and two for its gradients. Which of yours runs once, and what does it keep instead?"
    )
    assert looked.products <= 4 * depth, (
        f"{looked.products:.0f} products for {depth} layers: somewhere a layer runs forward more than twice."
    )


def _with(**options: Any) -> Answer:
    return lambda layer, w, x: _scan(jax.checkpoint(layer, **options), w, x)


def _every_other(layer: Answer, w_LDD: Any, x_ND: Any) -> Any:
    for i, w_DD in enumerate(w_LDD):
        x_ND = (jax.checkpoint(layer) if i % 2 else layer)(w_DD, x_ND)
    return x_ND


check_rematerialised_stack = Exercise(
    1,
    _scan,
    {"For 4 layers": (sine_layer, 4), "For 7 layers of another kind": (cosine_layer, 7)},
    lambda answer: (
        "One array per layer, and of the last one, which has no checkpoint, all that it computes. That costs little: "
        "it runs backward at once."
        if _last_is_free(7, _Looked(answer, sine_layer, 7))
        else "One array per layer, whatever the layer computes inside."
    ),
    {
        "Return the last layer's output": lambda layer, w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w),
        "Is every layer applied, and in the order of their weights?": [
            lambda layer, w, x: _scan(layer, w[:-1], x),
            lambda layer, w, x: _scan(layer, w[::-1], x),
        ],
        "Is a number of layers written into your answer?": lambda layer, w, x: _scan(layer, w[:4], x),
        "Is it the layer that was given?": lambda layer, w, x: _scan(sine_layer, w, x),
        "The output is right, and its gradient is not. Does every value still depend on the weights?": (
            lambda layer, w, x: _scan(layer, jax.lax.stop_gradient(w), x)
        ),
        "Is an input of a layer rounded before it is kept?": lambda layer, w, x: _scan(
            lambda w, x: layer(w, x.astype(jnp.bfloat16).astype(jnp.float32)), w, x
        ),
    },
    {
        _one_input_each: {
            "the least that a layer must have": [
                _loop,
                _every_other,
                _with(policy=_POLICIES.everything_saveable),
                _with(policy=_POLICIES.dots_saveable),
            ],
            "where no barrier stands": lambda layer, *wx: _loop(jax.checkpoint(layer, prevent_cse=False), *wx),
            "Where must boundaries be": [
                lambda layer, w, x: jax.checkpoint(partial(_scan, layer))(w, x),
                lambda layer, w, x: _groups(partial(_loop, layer), w, x, 2),
            ],
            "Which of yours runs once": lambda layer, w, x: _loop(
                jax.checkpoint(layer), w[-2:], layer(w[-3], _groups(partial(_loop, layer), w[:-3], x, 4))
            ),
        }
    },
    otherwise="Is every layer applied, once, and does every gradient arrive?",
    ask=_values,
    rtol=1e-4,
)


def _sizes(n_layers: int) -> list[int]:
    return [size for size in range(1, n_layers + 1) if n_layers % size == 0]


def _played(n_layers: int, kept: int, size: int) -> float:
    """Return the peak, in inputs: where the last group runs backward, its layers but one wait, and one is at work."""
    return n_layers // size - 1 + kept * (size - 1) + 21


def _cheapest(price: Answer) -> Answer:
    return lambda n_layers, kept: min(_sizes(n_layers), key=lambda size: price(n_layers / size, size, kept))


def _peak_of(answer: Answer, n_layers: int, kept: int) -> tuple[float, float]:
    """Return the peak of the size that is answered, and the size."""
    got = answer(n_layers, kept)
    assert got in _sizes(n_layers), (
        f"{n_layers} layers in groups of {got!r}: the groups must be equal. Which sizes divide {n_layers}?"
    )
    return _played(n_layers, kept, int(got)), got


_best = _cheapest(lambda groups, size, kept: groups + kept * size)

check_best_group = Exercise(
    2,
    _best,
    {
        f"{n_layers} layers, each layer of a group at work keeping {kept}": (n_layers, kept)
        # The last: the divisor nearest to the root is not the best.
        for n_layers, kept in (*itertools.product((16, 12, 20, 30, 28, 36, 64, 90, 7, 1), (1, 2, 3)), (44, 5))
    },
    "What groups keep and what the layers of one group keep balance: near the root of n_layers / kept.",
    {
        "the groups must be equal": [
            lambda n_layers, kept: int((n_layers / kept) ** 0.5),
            lambda n_layers, kept: 3,
        ],
        "Is that the size of a group, or how many groups there are?": lambda n_layers, kept: (
            n_layers // _best(n_layers, kept)
        ),
        "It would be best if each of these layers kept 1: is `kept` counted, and are sizes below the root tried?": (
            _cheapest(lambda groups, size, kept: groups + size)
        ),
        "What is kept once per group, and what for each of its layers?": [
            _cheapest(lambda groups, size, kept: kept * groups + size),
            lambda n_layers, kept: 1,
        ],
        "The root is a good guess, and its nearest divisor not always the best: are both sides of it tried?": (
            lambda n_layers, kept: min(_sizes(n_layers), key=lambda size: abs(size - (n_layers / kept) ** 0.5))
        ),
    },
    otherwise="Count what waits while the group that is first in the backward pass runs: what is there once per group, "
    "and what for each layer of that group?",
    ask=_peak_of,
    told=lambda got, *_: f"in groups of {got[1]} the peak is {got[0]:.0f} inputs, and another size has a lower one.",
    accepts=lambda got, best: got[0] == best[0],
)


def _an_input_per_group(answer: Answer) -> None:
    for depth, size in ((8, 2), (6, 3)):
        groups, looked = depth // size, _Looked(answer, sine_layer, depth, size)
        told = f"{depth} layers in groups of {size}"
        assert groups - 1.5 < looked.inputs < groups + 0.5, (
            f"{told}: the backward pass keeps {looked.inputs:.1f} arrays of the size of x. How many groups are there, "
            "and what does each of them need to run again?"
        )
        # A group runs again, all of it but perhaps its last layer, and then each of its layers.
        assert looked.products >= 5 * depth - groups, (
            f"{told}: {looked.products:.0f} products. Somewhere a group that runs again keeps everything of its "
            "layers. What would make each of its layers keep its input only?"
        )
        assert looked.products <= 5 * depth, (
            f"{told}: {looked.products:.0f} products. A layer runs forward more than three times."
        )
        for _, group in itertools.groupby(looked.around, key=lambda checkpoints: checkpoints[:1]):
            # The last layer of a group runs backward at once.
            assert all(len(checkpoints) > 1 for checkpoints in list(group)[:-1]), (
                f"{told}: a layer stands under its group's checkpoint alone. While that group runs backward, what is "
                "kept of this layer, and what of the others?"
            )


def _nested(layer: Answer, w_LDD: Any, x_ND: Any, size: int, inner: Any = None, outer: Any = None) -> Any:
    group = partial(_loop, jax.checkpoint(layer, **(inner or {})))
    return _groups(group, w_LDD, x_ND, size, **(outer or {}))


_NO_BARRIER = {"prevent_cse": False}

check_grouped_stack = Exercise(
    3,
    lambda layer, w_LDD, x_ND, size: _scan(layer, w_LDD, x_ND),
    {
        "For 6 layers in groups of 3": (sine_layer, 6, 3),
        "For 6 layers of another kind in groups of 2": (cosine_layer, 6, 2),
        "For 8 layers in groups of 2": (sine_layer, 8, 2),
    },
    "An input per group while the model runs, and for a while those of one group.",
    {
        "Return the last layer's output": lambda layer, w, x, size: (_nested(layer, w, x, size), None),
        "Is it the layer that was given?": lambda layer, w, x, size: _nested(sine_layer, w, x, size),
        "Is a number of layers written into your answer?": lambda layer, w, x, size: _scan(layer, w[:6], x),
        "Are all groups applied, and all layers of each?": [
            lambda layer, w, x, size: _scan(layer, w[:size], x),
            lambda layer, w, x, size: _scan(layer, w[::size], x),
        ],
    },
    {
        _an_input_per_group: {
            "How many groups are there": [
                lambda layer, w, x, size: _loop(layer, w, x),
                lambda layer, w, x, size: _scan(jax.checkpoint(layer), w, x),
                lambda layer, w, x, size: _nested(layer, w, x, len(w) // size),
            ],
            "where no barrier stands": [
                partial(_nested, inner=_NO_BARRIER, outer=_NO_BARRIER),
                partial(_nested, inner=_NO_BARRIER),
            ],
            "keeps everything of its": [
                lambda layer, w, x, size: _groups(partial(_loop, layer), w, x, size),
                partial(_nested, inner={"policy": _POLICIES.dots_saveable}),
            ],
            "under its group's checkpoint alone": lambda layer, w, x, size: _groups(
                lambda w, x: _scan(jax.checkpoint(layer), w[1:], layer(w[0], x)), w, x, size
            ),
        }
    },
    otherwise="Is every layer applied, once, and does every gradient arrive?",
    ask=_values,
    rtol=1e-4,
)
