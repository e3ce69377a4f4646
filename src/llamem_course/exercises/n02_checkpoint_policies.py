"""The exercises of notebook 02."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmem.compiling import matmul_flops
from jaxmem.tracing.residuals import saved_residuals
from llamem.layers.remat import Policy
from llamem.llama.config import LlamaConfig
from llamem_course.exercises.exercise import Answer, Exercise, quickly

MiB = 2**20
_POLICIES = jax.checkpoint_policies


def _elements(config: LlamaConfig, tokens: int, names: Iterable[str], **other: Any) -> int:
    """Return how many numbers all layers keep, by the widths of names, or `other` widths."""
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    width = {"q": heads, "k": kv_heads, "v": kv_heads, "attn": heads, "gate": config.d_ff, "up": config.d_ff}
    width |= {"input": config.d_model} | other
    return config.n_layers * tokens * sum(width[name] for name in ("input", *names))


def _bytes(config: LlamaConfig, tokens: int, names: Iterable[str], **other: Any) -> int:
    return config.compute_dtype.itemsize * _elements(config, tokens, names, **other)


def _logsumexp(config: LlamaConfig, tokens: int) -> int:
    return 4 * config.n_layers * tokens * config.n_heads


def _answered_bytes(answer: Answer, config: LlamaConfig, tokens: int, names: tuple[str, ...]) -> Any:
    """Return the bytes; where attention is kept, without the logsumexp of its scores, if they count that."""
    got, extra = answer(config, tokens, names), _logsumexp(config, tokens) * ("attn" in names)
    assert got is not None, "Return a number of bytes."
    return got - extra if got == _bytes(config, tokens, names) + extra else got


_LLAMA = LlamaConfig.from_name("llama3-8b", compute_dtype=jnp.bfloat16)
# Its heads are wider together than its residual stream; and it is stored in another type than it computes in.
_QWEN = LlamaConfig.from_name("qwen3-0.6b", compute_dtype=jnp.bfloat16, param_dtype=jnp.float32)

check_residual_bytes = Exercise(
    1,
    _bytes,
    {
        f"{config.n_layers} layers, {tokens:,} tokens, computing in {config.compute_dtype}, keeping {names}": (
            config,
            tokens,
            names,
        )
        for config, tokens, names in (
            (_LLAMA, 1000, ()),
            (_LLAMA, 1007, ("attn",)),
            (_LLAMA, 1014, ("k", "v")),
            (_LLAMA, 1021, ("gate", "up", "q")),
            (_QWEN, 1028, ("q", "attn")),
            (_QWEN, 1035, ("k", "gate")),
            (_LLAMA.replace(compute_dtype=jnp.float32), 1042, ("up",)),
        )
    },
    "Widths times tokens times layers: a policy can be priced before anything is compiled.",
    {
        "That is one layer's. How many has this model?": lambda config, *rest: _bytes(config, *rest) // config.n_layers,
        "Bytes are asked for, and yours are MiB.": lambda *given: _bytes(*given) / MiB,
        "How many bytes has one element?": lambda *given: 2 * _elements(*given),
        "What does a layer keep that saves no name at all?": partial(_bytes, input=0),
        "In which type are activations computed, and in which are weights stored? Or does an array count twice?": [
            lambda config, N, names: _bytes(config, N, (*names, "input")),
            lambda config, *rest: config.param_dtype.itemsize * _elements(config, *rest),
        ],
        "Is a number of tokens written into your answer?": lambda config, N, names: _bytes(config, 1000, names),
        "Are all names counted, each with its own width?": lambda config, N, names: _bytes(config, N, names[:1]),
        "Only attention keeps a logsumexp.": lambda config, N, names: _bytes(config, N, names) + _logsumexp(config, N),
        "These are two arrays. Do keys and values have as many heads as queries?": lambda config, N, names: _bytes(
            config, N, names, k=config.n_heads * config.head_dim, v=config.n_heads * config.head_dim
        ),
        "How wide is a feed-forward inside?": lambda config, N, names: _bytes(
            config, N, names, gate=config.d_model, up=config.d_model
        ),
        "Are all heads together always as wide as the residual stream?": lambda config, N, names: _bytes(
            config, N, names, q=config.d_model, attn=config.d_model
        ),
        "Which number of the configuration says how wide it is? No share of d_model.": (
            lambda config, N, names: _bytes(config, N, names, k=config.d_model // 4, v=config.d_model // 4)
        ),
    },
    otherwise="Which arrays are kept, how wide is each, and for how many layers and tokens?",
    ask=_answered_bytes,
    told=lambda got, expected, *_: f"yours is {got / expected:.3f} times what is kept.",
    rtol=1e-9,
)


def priced(config: LlamaConfig, tokens: int) -> dict[str, tuple[int, int]]:
    """For one sequence, by name: bytes that all layers keep of it, and FLOPs of the matmuls that they then spare.

    Each name spares the matmul that makes it; `attn` is the scores times the values, in plain attention.
    """
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    # Of each name: how wide it is, and over how many numbers each of its own is a sum.
    sizes = {"q": (heads, config.d_model), "k": (kv_heads, config.d_model), "v": (kv_heads, config.d_model)}
    sizes |= {"attn": (heads, tokens), "attn_out": (config.d_model, heads)}
    sizes |= dict.fromkeys(("gate", "up"), (config.d_ff, config.d_model))
    rows = config.n_layers * tokens
    return {
        name: (rows * width * config.compute_dtype.itemsize, 2 * rows * width * inner)
        for name, (width, inner) in sizes.items()
    }


Table = dict[str, tuple[int, int]]


def _sum(table: Table, names: Iterable[str], column: int) -> int:
    return sum(table[name][column] for name in names)


def _fitting(table: Table, budget: int) -> list[tuple[str, ...]]:
    choices = [names for n in range(len(table) + 1) for names in itertools.combinations(table, n)]
    return [names for names in choices if _sum(table, names, 0) <= budget]


def _most(key: Answer, among: Answer = lambda names: True) -> Answer:
    """Save those of the fitting choices `among` which the key is greatest."""
    return lambda table, budget: Policy(
        save=max(filter(among, _fitting(table, budget)), key=lambda names: key(table, names), default=())
    )


def _first(key: Answer) -> Answer:
    """Save names in the order of a key, each that still fits."""

    def best_policy(table: Table, budget: int) -> Policy:
        names: tuple[str, ...] = ()
        for name in sorted(table, key=lambda name: key(*table[name])):
            names += (name,) * (_sum(table, (*names, name), 0) <= budget)
        return Policy(save=names)

    return best_policy


def _spared(table: Table, names: Iterable[str]) -> int:
    return _sum(table, names, 1)


def _kept_and_spared(answer: Answer, table: Table, budget: int) -> tuple[int, int]:
    try:
        policy = answer(dict(table), budget)
    except ValueError as error:
        assert budget, f"A budget of no bytes fits the choice that keeps nothing. Yours ends in: {error}"
        raise
    assert isinstance(policy, Policy), f"Return a llamem.Policy that says what to save, not {type(policy).__name__}."
    assert policy == Policy(save=policy.save) and set(policy.save) <= set(table), (
        f"{policy}: save names of the table, and nothing else. It prices no other place."
    )
    kept = _sum(table, set(policy.save), 0)
    question = "Of how many layers are the table's bytes?" if budget else "Which policy keeps nothing at all?"
    assert kept <= budget, (
        f"{policy.save} keeps {kept / MiB:,.0f} of {budget / MiB:,.0f} MiB. That is more than there is. {question}"
    )
    return kept, _spared(table, set(policy.save))


def _cases() -> dict[str, tuple[Table, int]]:
    one_b, eight_b, qwen = (
        LlamaConfig.from_name(name, compute_dtype=jnp.bfloat16) for name in ("llama3.2-1b", "llama3-8b", "qwen3-0.6b")
    )
    # Budgets in KiB for one token in one layer: small enough to write down, and to do in one's head.
    sizes = ((one_b, 2048, 0), (one_b, 2048, 25), (one_b, 2048, 100), (eight_b, 8192, 30), (eight_b, 8192, 36))
    return {
        f"{config.n_layers} layers of width {config.d_model}, {tokens:,} tokens, {kib} KiB for a token in a layer": (
            priced(config, tokens),
            kib * 1024 * tokens * config.n_layers,
        )
        for config, tokens, kib in (*sizes, (eight_b, 5120, 35), (qwen, 1024, 12))
    }


check_best_policy = Exercise(
    2,
    _most(_spared),
    _cases(),
    "Seven names are few enough to try every choice, before anything is compiled.",
    {
        "Return a llamem.Policy": lambda table, budget: _most(_spared)(table, budget).save,
        "It prices no other place.": lambda table, budget: Policy(offload=tuple(table)),
        "That is more than there is.": lambda table, budget: _most(_spared)(table, 16 * budget),
        "Is there no name that fits?": lambda table, budget: Policy(),
        "A budget of no bytes fits the choice that keeps nothing.": lambda table, budget: Policy(
            save=max((names for names in _fitting(table, budget) if _sum(table, names, 0) < budget), key=len)
        ),
        "A full budget is not the aim, nor the first name that fits. What does a byte of each choice spare?": [
            _most(lambda table, names: _sum(table, names, 0)),
            _first(lambda n_bytes, flops: -flops),
        ],
        "The best bargains first, and there is room left that no name fits. Which one would you give back?": (
            _first(lambda n_bytes, flops: -flops / n_bytes)
        ),
        "Is there a choice of more names, and may it fill the budget to the last byte?": [
            lambda table, budget: _most(_spared)(table, budget - 1),
            _most(_spared, lambda names: len(names) < 4),
        ],
        "Is a name of the table left out?": _most(_spared, lambda names: "attn_out" not in names),
        "The most for a byte on the whole is no aim: a small choice has it, and leaves room.": (
            _most(lambda table, names: _spared(table, names) / max(1, _sum(table, names, 0)))
        ),
    },
    otherwise="Which name would you give back, to make use of the room that is left?",
    ask=_kept_and_spared,
    told=lambda got, best, *_: (
        f"yours keeps {got[0] / MiB:,.0f} MiB and spares {got[1] / 1e12:.2f} TFLOP, of {best[1] / 1e12:.2f} possible."
    ),
    accepts=lambda got, best: got[1] == best[1],
)

_ROWS, _NARROW, _WIDE = 30, 8, 64


def _layer(w1: Any, w2: Any, w3: Any, x: Any, *, wide: Answer = lambda a: a, narrow: Answer = lambda a: a) -> Any:
    return jnp.sin(narrow(wide(jnp.tanh(x @ w1)) @ w2)) @ w3


def _arguments() -> list[jax.Array]:
    sizes = ((_NARROW, _WIDE), (_WIDE, _NARROW), (_NARROW, _WIDE), (_ROWS, _NARROW))
    return [0.3 * jax.random.normal(jax.random.key(i), size) for i, size in enumerate(sizes)]


def _gradients(fn: Answer) -> Answer:
    return jax.value_and_grad(lambda *args: (fn(*args) ** 2).sum(), argnums=(0, 1, 2, 3))


def _output_and_gradients(answer: Answer) -> Any:
    got = answer(*_arguments())
    assert np.shape(got) == (_ROWS, _WIDE), f"Return the layer's output, {(_ROWS, _WIDE)}."
    return got, quickly(_gradients(answer))(*_arguments())[1]


def _one_narrow_array(answer: Answer) -> None:
    kept = saved_residuals(lambda *args: answer(*args).sum(), *_arguments()).bytes
    assert kept > 0, "Nothing is kept besides the arguments. Is the name in the policy, and is its result used?"
    assert kept <= (size := _ROWS * _NARROW * 4), (
        f"{kept:,} bytes are kept, and the narrow array has {size:,}. Look at the list with jaxmem.saved_residuals: "
        f"what else is in it?"
    )
    flops = matmul_flops(jax.make_jaxpr(_gradients(answer))(*_arguments()).jaxpr)
    assert (matmuls := flops / (2 * _ROWS * _NARROW * _WIDE)) <= 10, (
        f"{matmuls:.0f} matmuls: a narrow array is kept, and yet the one that makes it runs again. Which array "
        f"does the derivative of a sine need?"
    )


_named = partial(checkpoint_name, name="narrow")


_NAME_ALONE = _POLICIES.save_only_these_names("narrow")


def _kept(fn: Answer, policy: Any = _NAME_ALONE) -> Answer:
    return jax.checkpoint(fn, policy=policy)


def _dropped(w1: Any, w2: Any, w3: Any, x: Any) -> Any:
    _named(jnp.tanh(x @ w1) @ w2)
    return _layer(w1, w2, w3, x)


def _after_the_sine(w1: Any, w2: Any, w3: Any, x: Any) -> Any:
    return _named(jnp.sin(jnp.tanh(x @ w1) @ w2)) @ w3


_NARROW_NAMED, _WIDE_NAMED = partial(_layer, narrow=_named), partial(_layer, wide=_named)

check_thrifty = Exercise(
    3,
    _layer,
    {"With random weights": ()},
    "One array kept, one matmul of three repeated.",
    {
        "Is every function of the layer there?": lambda w1, w2, w3, x: jnp.tanh(x @ w1) @ w2 @ w3,
        "The narrow array is rounded: is it kept in the type that it is computed in?": (
            partial(_layer, narrow=lambda a: a.astype(jnp.bfloat16).astype(jnp.float32))
        ),
        "The output is right, and a gradient is not: does anything stop it on its way back?": [
            partial(_layer, wide=jax.lax.stop_gradient),
            partial(_layer, narrow=jax.lax.stop_gradient),
        ],
    },
    {
        _one_narrow_array: {
            "what else is in it": [
                _layer,
                _NARROW_NAMED,
                _kept(_WIDE_NAMED),
                _kept(_NARROW_NAMED, _POLICIES.everything_saveable),
                _kept(_NARROW_NAMED, _POLICIES.dots_saveable),
            ],
            "Is the name in the policy": [
                _kept(_NARROW_NAMED, _POLICIES.save_only_these_names("narow")),
                _kept(_dropped),
                jax.checkpoint(_kept(_NARROW_NAMED)),
            ],
            "the one that makes it runs again": lambda w1, w2, w3, x: _kept(_layer)(w1, w2, w3, _named(x)),
            "the derivative of a sine": _kept(_after_the_sine),
        }
    },
    otherwise="Compare with the layer as the text writes it, function by function.",
    ask=_output_and_gradients,
    rtol=1e-4,
)
