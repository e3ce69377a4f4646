"""The exercises of notebook 05. The devices of a mesh are the rows of a `jax.vmap` with an axis name."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises.exercise import Answer, Exercise

DEVICES, AXIS = 8, "words"  # as many as the notebook has, along an axis of another name

# Bytes that arrive at a device of a ring, for each byte of a collective's result, by JAX's names.
ARRIVES = dict.fromkeys(("psum", "pmax", "pmin"), 2 * (DEVICES - 1) / DEVICES)
ARRIVES |= dict.fromkeys(("all_gather", "all_to_all"), (DEVICES - 1) / DEVICES)
ARRIVES |= {"reduce_scatter": DEVICES - 1.0, "ppermute": 1.0}


def _on_devices(fn: Answer, *parts: Any) -> Any:
    """Return `fn(*parts, axis)` of every device, each with its row of the parts; results `[devices, ..]`."""
    try:
        with jax.disable_jit():  # compiled, NaN * False is 0: XLA makes a choice of such a product
            return jax.vmap(lambda *own: fn(*own, AXIS), axis_name=AXIS)(*parts)
    except NameError as error:  # JAX's for an axis that nobody has named, or Python's
        raise AssertionError(
            f"{str(error).split('.')[0]}. If that is an axis: devices stand along another one here, and its name is "
            "the last argument of your function."
        ) from None


def _traced(fn: Answer, *own: Any) -> Any:
    """Return one device's program."""
    return jax.make_jaxpr(lambda *args: fn(*args, AXIS), axis_env=[(AXIS, DEVICES)])(*own)


def _arrive_at_most(enough: float, program: Any, hint: str) -> None:
    """Refuse a program in which more bytes arrive at a device, in all collectives, loops multiplied out."""
    arriving = 0.0
    for eqn, times in equations(program.jaxpr):
        avals: list[Any] = [var.aval for var in eqn.outvars]
        factor = ARRIVES.get(eqn.primitive.name.removesuffix("_invariant"), 0)
        arriving += times * factor * sum(aval.size * aval.dtype.itemsize for aval in avals)
    assert arriving <= enough, (
        f"Right, but in a ring {arriving:,.0f} bytes arrive at each device where {enough:,.0f} are enough. {hint}"
    )


def _differ(got_E: Any) -> str:
    same = np.allclose(got_E, got_E[:1], rtol=1e-5, equal_nan=True)
    return "" if same else "the devices end with different answers."


# Exercise 1: the mean over all devices' tokens that count.


def _counted(losses_n: Any, counts_n: Any) -> Any:
    return jnp.sum(jnp.where(counts_n, losses_n, 0))


def _mean(losses_n: Any, counts_n: Any, axis: str) -> Any:
    total, count = lax.psum((_counted(losses_n, counts_n), jnp.sum(counts_n)), axis)
    return total / count


def _own_mean(losses_n: Any, counts_n: Any, axis: str) -> Any:
    return _counted(losses_n, counts_n) / jnp.sum(counts_n)


def _one_number(answer: Answer, losses_En: Any, counts_En: Any) -> Any:
    found_E = _on_devices(answer, losses_En, counts_En)
    shape = getattr(found_E, "shape", None)
    assert shape == losses_En.shape[:1], f"Return one number, the mean; yours are {shape} on {len(losses_En)} devices."
    return found_E


def _two_numbers_travel(answer: Answer) -> None:
    program = _traced(answer, jnp.zeros(1000), jnp.ones(1000, bool))
    _arrive_at_most(99, program, "Two numbers say all that others have to know of a device's 1,000 tokens.")


def _it_trains(answer: Answer) -> None:
    counts_EN = jnp.array(_COUNTS_EN)
    found_EN = jax.grad(lambda losses_EN: _on_devices(answer, losses_EN, counts_EN)[0])(jnp.array(_LOSSES_EN))
    assert np.allclose(found_EN, counts_EN / counts_EN.sum(), rtol=1e-4), (
        "Right, but differentiated for the losses it does not give 1 / count for each that counts. What stops it?"
    )


def _nothing_is_added(answer: Answer) -> None:
    one_counts_En = np.arange(6).reshape(2, 3) == 4
    found = float(_on_devices(answer, np.full((2, 3), 4, np.float32), one_counts_En)[0])
    assert found == 4, f"One token counts, its loss is 4, and the mean is {found:.7}. What else is in your count?"


_LOSSES_EN = np.arange(1.0, 49, dtype=np.float32).reshape(8, 6) ** 1.5
_COUNTS_EN = np.arange(48).reshape(8, 6) % 7 < 4
_COUNTS_EN[5] = False  # padding alone
_COUNTS_EN[2] = np.arange(6) == 1
_FEW_EN = np.array([[True, False, True], [False, True, False]])
_FAILED_EN = np.where(np.arange(48).reshape(8, 6) == 13, np.nan, _LOSSES_EN)

check_mean_over_devices = Exercise(
    1,
    _mean,
    {
        "On 8 devices, one of them with padding alone": (_LOSSES_EN, _COUNTS_EN),
        "On 2 devices with 3 tokens each": (_LOSSES_EN[:2, :3], _FEW_EN),
        "Where each loss that does not count is NaN": (np.where(_COUNTS_EN, _LOSSES_EN, np.nan), _COUNTS_EN),
        "Where a loss that counts is NaN": (_FAILED_EN, _COUNTS_EN),
    },
    "Sum and count travel, and are divided once, at the end.",
    {
        "Return one number": lambda losses, counts, axis: losses,
        "Is the sum or the count still a device's own?": _own_mean,
        "A device without a token that counts has 0 / 0, and it is in your mean.": (
            lambda *given: lax.pmean(_own_mean(*given), given[2])
        ),
        "That is the mean of the devices' means: each weighs as much as another.": (
            lambda *given: lax.pmean(jnp.nan_to_num(_own_mean(*given)), given[2])
        ),
        "That is the mean over all tokens: which of them count?": lambda losses, _, axis: lax.pmean(
            losses.mean(), axis
        ),
        "You divide by all tokens; how many count?": (
            lambda losses, counts, axis: lax.pmean(_counted(losses, counts) / counts.size, axis)
        ),
        "That is the sum: divided by what?": lambda losses, counts, axis: lax.psum(_counted(losses, counts), axis),
        "You divide by the devices; how many tokens count?": (
            lambda losses, counts, axis: lax.pmean(_counted(losses, counts), axis)
        ),
        "Which two numbers has each device to give": (
            lambda losses, counts, axis: lax.psum(losses.sum(), axis) / lax.psum(counts.sum(), axis)
        ),
        "Is a number of devices written into your answer?": lambda *given: _mean(*given) * 8 / lax.axis_size(given[2]),
        "What is NaN times 0, unless a compiler drops the product? Leave such a loss out.": (
            lambda losses, counts, axis: lax.psum(jnp.sum(losses * counts), axis) / lax.psum(jnp.sum(counts), axis)
        ),
        "A run that fails goes on unseen. Which losses may be left out: those that are NaN, or that do not count?": (
            lambda losses, counts, axis: lax.psum(jnp.nansum(losses * counts), axis) / lax.psum(counts.sum(), axis)
        ),
    },
    {
        _two_numbers_travel: {
            "Two numbers say all": (
                lambda losses, counts, axis: jnp.mean(lax.all_gather(losses, axis), where=lax.all_gather(counts, axis))
            )
        },
        _it_trains: {"What stops it": lambda *given: lax.stop_gradient(_mean(*given))},
        _nothing_is_added: {
            "in your count": lambda losses, counts, axis: (
                lax.psum(_counted(losses, counts), axis) / (lax.psum(jnp.sum(counts), axis) + 1e-6)
            )
        },
    },
    otherwise="Which two numbers has each device to give, and when are they divided?",
    ask=_one_number,
    told=lambda got, right, *_: _differ(got) or f"yours is {got[0]:.3f} where {right[0]:.3f} is right.",
)

# Exercise 2: the logit of each token's target, of which one device alone has the row.


def _logit(x: Any, w: Any, ids: Any, axis: str, *, own: Any = None, here: Any = None, meet: Answer = lax.psum) -> Any:
    """Return the logits, right but for what is given."""
    own = ids - lax.axis_index(axis) * len(w) if own is None else own
    here = (own >= 0) & (own < len(w)) if here is None else here
    return meet(jnp.where(here, jnp.sum(x * w[jnp.clip(own, 0, len(w) - 1)], 1), 0), axis)


def _shifted(ids: Any, w: Any, axis: str) -> Any:
    return ids - lax.axis_index(axis) * len(w)


def _logits(answer: Answer, x_ND: Any, head_EUD: Any, ids_N: Any) -> Any:
    found_EN = _on_devices(lambda head_UD, axis: answer(x_ND, head_UD, ids_N, axis), head_EUD)
    shape = getattr(found_EN, "shape", ())
    assert shape == (len(head_EUD), len(ids_N)), f"Return one number per token, [N] on each device, not {shape[1:]}."
    return found_EN


def _which_are_wrong(got_EN: Any, right_EN: Any, x_ND: Any, head_EUD: Any, ids_N: Any) -> str:
    first_N = ids_N < head_EUD.shape[1]
    if len(head_EUD) == 1 or _differ(got_EN):
        return _differ(got_EN)
    if not np.allclose(got_EN[0, first_N], right_EN[0, first_N], atol=1e-4):
        return (
            "for targets in the rows of the first device it is wrong: what do the devices add that do not hold the "
            "row? An id that a device does not hold still reads some row."
        )
    return (
        "targets of the first device's rows are right, others are not. In which row of its own does a device find an "
        "id of the whole vocabulary, and how does it know that it has no such row?"
    )


def _one_row_is_read(answer: Answer) -> None:
    ids_N = jnp.array([0, 39, 7, 12, 5, 4, 16, 9])
    programs = [
        _traced(lambda head_UD, axis: answer(jnp.ones((8, 3)), head_UD, ids_N, axis), jnp.ones((rows, 3)))
        for rows in (5, 50)
    ]
    _arrive_at_most(ARRIVES["psum"] * 8 * 4, programs[0], "One number per token is enough.")
    few, many = (
        sum(times * sum(getattr(var.aval, "size", 0) for var in eqn.outvars) for eqn, times in equations(program.jaxpr))
        for program in programs
    )
    open_loop = any(eqn.primitive.name == "while" for eqn, _ in equations(programs[0].jaxpr))
    assert many == few and not open_loop, (
        f"Right, but with 50 words on a device it makes {many:,} numbers and with 5 words {few:,}, or nobody can say "
        "how often its loop runs: one for every token and every word of its own, as its logits are. How many rows of "
        "the head does a token want?"
    )
    sizes = [getattr(var.aval, "size", 0) for eqn, _ in equations(programs[0].jaxpr) for var in eqn.outvars]
    assert max(sizes) < len(ids_N) ** 2, (
        f"Right, but with {len(ids_N)} tokens an array of {max(sizes)} numbers is made, one for each token with each "
        "token's target. How many of them are wanted?"
    )


def _few_messages(answer: Answer) -> None:
    case = jnp.ones((8, 3)), jnp.ones((5, 3)), jnp.arange(8)
    program = _traced(answer, *case)
    sent = sum(times for eqn, times in equations(program.jaxpr) if eqn.primitive.name.split("_invariant")[0] in ARRIVES)
    assert sent < 8, f"Right, but for 8 tokens {sent} messages are sent. How many are enough for all tokens together?"


def _the_logit_trains(answer: Answer) -> None:
    x_ND, head_EUD, ids_N = _case(8, 5, _IDS)
    try:
        dx_ND, dhead_EUD = jax.grad(lambda x, head: _logits(answer, x, head, ids_N)[0].sum(), (0, 1))(x_ND, head_EUD)
    except NotImplementedError as error:  # JAX's, and no sign that the answer was not tried
        raise AssertionError(
            f"Right, but JAX cannot differentiate it, as a loss has to be: {error}. Which collective has a derivative?"
        ) from None
    rows_VD = head_EUD.reshape(-1, 3)
    right_VD = np.zeros_like(rows_VD)
    np.add.at(right_VD, ids_N, x_ND)
    same = np.allclose(dx_ND, rows_VD[ids_N], atol=1e-4)
    assert same and np.allclose(dhead_EUD.reshape(-1, 3), right_VD, atol=1e-4), (
        "Right, but differentiated it does not give each token the row of its target, and each row its tokens' hidden "
        "states. What stops it?"
    )


def _all_its_logits(x: Any, w: Any, ids: Any, axis: str) -> Any:
    own = _shifted(ids, w, axis)[:, None] == jnp.arange(len(w))
    return lax.psum(jnp.sum((x @ w.T) * own, 1), axis)


def _every_pair(x: Any, w: Any, ids: Any, axis: str) -> Any:
    own = _shifted(ids, w, axis)
    pairs = x @ w[jnp.clip(own, 0, len(w) - 1)].T
    return lax.psum(jnp.where((own >= 0) & (own < len(w)), jnp.diagonal(pairs), 0), axis)


def _largest(x: Any, w: Any, ids: Any, axis: str) -> Any:
    own = _shifted(ids, w, axis)
    found = jnp.sum(x * w[jnp.clip(own, 0, len(w) - 1)], 1)
    return lax.pmax(jnp.where((own >= 0) & (own < len(w)), found, -jnp.inf), axis)


def _word_by_word(x: Any, w: Any, ids: Any, axis: str) -> Any:
    def look(carry: Any) -> Any:
        word, found = carry
        return word + 1, found + jnp.where(_shifted(ids, w, axis) == word, x @ w[word], 0)

    return lax.psum(lax.while_loop(lambda carry: carry[0] < len(w), look, (0, jnp.zeros(len(x))))[1], axis)


def _case(devices: int, rows: int, ids: list[int]) -> tuple[Any, ...]:
    random = np.random.default_rng(rows)
    shapes = ((len(ids), 3), (devices, rows, 3))
    return *(random.normal(size=shape).astype(np.float32) for shape in shapes), np.array(ids)


_IDS = [0, 39, 7, 12, 5, 4, 16, 9, 10, 25, 31, 2, 22, 38, 19, 28]

check_target_logit = Exercise(
    2,
    _logit,
    {
        "Where one device holds all words": _case(1, 40, _IDS),
        "With 5 words on each device": _case(8, 5, _IDS),
        "With 8 words on each device": _case(8, 8, [63, 7, 8, 0, 17, 23, 40, 55]),
    },
    "One message of [N]. The row of a target never leaves its device.",
    {
        "name is the last argument": lambda x, w, ids, axis: _logit(x, w, ids, "tensor"),
        "one number per token": lambda x, w, ids, axis: lax.psum(x @ w.T, axis),
        "Which row of the head belongs to an id": lambda x, w, ids, axis: _logit(x, w, ids - 1, axis),
        "Each device has the logits whose row it holds, and 0 for the others. They have not told each other yet.": (
            partial(_logit, meet=lambda a, axis: a)
        ),
        "devices end with different answers": partial(_logit, here=True, meet=lambda a, axis: a),
        "Negative logits come out as 0. Which of the collectives leaves a number as it is when zeros join it?": (
            partial(_logit, meet=lax.pmax)
        ),
        "still reads some row": [
            partial(_logit, here=True),
            lambda x, w, ids, axis: _logit(x, w, ids, axis, here=_shifted(ids, w, axis) < len(w)),
        ],
        "In which row of its own": [
            lambda x, w, ids, axis: _logit(x, w, ids, axis, own=ids, here=ids // len(w) == lax.axis_index(axis)),
            lambda x, w, ids, axis: _logit(x, w, ids, axis, here=_shifted(ids, w, axis) >= 0),
        ],
    },
    {
        _one_row_is_read: {
            "One number per token is enough": (
                lambda x, w, ids, axis: jnp.sum(x * lax.all_gather(w, axis, tiled=True)[ids], 1)
            ),
            "one for every token": [_all_its_logits, _word_by_word],
            "each token's target": _every_pair,
        },
        _few_messages: {
            "for all tokens together": lambda x, w, ids, axis: jnp.concatenate(
                [_logit(x[i : i + 1], w, ids[i : i + 1], axis) for i in range(len(ids))]
            )
        },
        _the_logit_trains: {
            "Which collective has a derivative": _largest,
            "What stops it": lambda *given: lax.stop_gradient(_logit(*given)),
        },
    },
    otherwise="Which row of the head belongs to an id, and what is the logit of a token for it?",
    ask=_logits,
    told=_which_are_wrong,
)

# Exercise 3: logsumexp, and the softmax's mean of the head's rows, from what each device found in its own rows.


def _merge(
    m: Any, s: Any, mix: Any, axis: str, *, top: Answer = lax.pmax, scale: Answer = jnp.exp, meet: Answer = lax.psum
) -> tuple[Any, Any]:
    """Return both, right but for what is given."""
    top_N = top(m, axis)
    s, mix = meet((s * scale(m - top_N), mix * scale(m - top_N)[:, None]), axis)
    return top_N + jnp.log(s), mix / s[:, None]


def _mean_by(of: Answer) -> Answer:
    """Return the right logsumexp beside another mean."""
    return lambda m, s, mix, axis: (_merge(m, s, mix, axis)[0], of(m, s, mix, axis))


def _shrunk(m: Any, mix: Any, axis: str) -> Any:
    return lax.psum(mix * jnp.exp(m - lax.pmax(m, axis))[:, None], axis)


def _gathered(m: Any, s: Any, mix: Any, axis: str) -> tuple[Any, Any]:
    lse = jax.nn.logsumexp(lax.all_gather(m + jnp.log(s), axis), axis=0)
    return lse, lax.psum(mix * jnp.exp(m - lse)[:, None], axis)


def _sweep(z_NU: Any, head_UD: Any) -> tuple[Any, Any, Any]:
    top_N = z_NU.max(1)
    exp_NU = jnp.exp(z_NU - jnp.where(jnp.isinf(top_N), 0, top_N)[:, None])
    return top_N, exp_NU.sum(1), exp_NU @ head_UD


def _both(answer: Answer, z_ENU: Any, head_EUD: Any) -> tuple[Any, Any]:
    found = _on_devices(answer, *jax.vmap(_sweep)(z_ENU, head_EUD))
    sizes = [z_ENU.shape[:2], (*z_ENU.shape[:2], head_EUD.shape[2])]
    two = isinstance(found, tuple | list) and [jnp.shape(one) for one in found] == sizes
    assert two, "Return two arrays in this order: logsumexp, one number per token, and the mean, [N, D]."
    return tuple(found)


def _which_is_wrong(got: Any, right: Any, *_: Any) -> str:
    lse_holds = np.allclose(got[0], right[0], rtol=1e-4, equal_nan=True)
    return _differ(got[0]) or ("logsumexp is right, the mean is not." if lse_holds else "logsumexp is wrong.")


def _little_travels(answer: Answer) -> None:
    program = _traced(answer, jnp.zeros(16), jnp.ones(16), jnp.ones((16, 8)))
    hint = "To be added up or compared, numbers need not be collected first, nor sent twice."
    _arrive_at_most(ARRIVES["psum"] * 4 * (2 * 16 + 16 * 8), program, hint)


_random = np.random.default_rng(0)
_Z_ENU = 60 * _random.normal(size=(DEVICES, 16, 5)).astype(np.float32)
_Z_ENU[:, 1] /= 60  # a token for which no word has all the weight
_Z_ENU[:, 2:4] -= 500  # for others one device's maximum is far above or below the others', or far below 0
_Z_ENU[2, 4] += 500
_Z_ENU[0, 5] += 500
_MASKED_ENU = np.where((np.arange(8) == 1)[:, None, None] & (np.arange(16) == 2)[:, None], -np.inf, _Z_ENU)
_HEAD_EUD = _random.normal(size=(DEVICES, 5, 8)).astype(np.float32)

check_merge_devices = Exercise(
    3,
    _gathered,
    {
        "On 8 devices": (_Z_ENU, _HEAD_EUD),
        "Where all words of one device are masked": (_MASKED_ENU, _HEAD_EUD),
        "On 2 devices": (_Z_ENU[:2], _HEAD_EUD[:2]),
    },
    "Two numbers and one row per token travel, whatever the size of the vocabulary.",
    {
        "name is the last argument": lambda m, s, mix, axis: _merge(m, s, mix, "tensor"),
        "Return two arrays": [lambda *given: _merge(*given)[0], lambda *given: _merge(*given)[::-1]],
        "Somewhere each of them goes on with its own numbers.": [
            lambda m, s, mix, axis: (m + jnp.log(s), mix / s[:, None]),
            partial(_merge, meet=lambda a, axis: a),
        ],
        "From which maximum does the sum of all devices count, and does the result say so?": [
            partial(_merge, scale=jnp.ones_like),
            partial(_merge, scale=lambda less: jnp.exp(jnp.clip(-less, 0, 80))),
            partial(_merge, top=lax.pmean),
            partial(_merge, top=lambda m, axis: jnp.maximum(lax.pmax(m, axis), 0)),
            lambda m, s, mix, axis: (_merge(m, s, mix, axis)[0] - lax.pmax(m, axis), _merge(m, s, mix, axis)[1]),
        ],
        "That is the mean of the devices' means: each weighs as much as another, however little of the softmax lies in "
        "its own rows. Which two sums make the mean of all rows?": (
            _mean_by(lambda m, s, mix, axis: lax.pmean(mix / s[:, None], axis))
        ),
        "Numerator and denominator of this quotient must count from one maximum.": [
            _mean_by(
                lambda m, s, mix, axis: (
                    lax.psum(mix, axis) / lax.psum(s * jnp.exp(m - lax.pmax(m, axis)), axis)[:, None]
                )
            ),
            _mean_by(lambda m, s, mix, axis: _shrunk(m, mix, axis) / lax.psum(s, axis)[:, None]),
        ],
        "A number in place of -inf may lie far above all other maxima.": (
            lambda m, s, mix, axis: _merge(jnp.where(jnp.isinf(m), 0, m), s, mix, axis)
        ),
        "What is never divided by its own sum cannot be 0 / 0.": _mean_by(
            lambda m, s, mix, axis: lax.psum(
                mix / s[:, None] * (s * jnp.exp(m - _merge(m, s, mix, axis)[0]))[:, None], axis
            )
        ),
        "Is a number of devices written into your answer?": partial(
            _merge, meet=lambda a, axis: jax.tree.map(lambda one: 8 * lax.pmean(one, axis), a)
        ),
    },
    {_little_travels: {"need not be collected first": _gathered}},
    otherwise="From which maximum does each of the three sums count, and what is divided by what?",
    ask=_both,
    told=_which_is_wrong,
    rtol=1e-4,
)
