"""The exercises of notebook 00."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from llamem.llama.config import LlamaConfig
from llamem_course.exercises.exercise import Answer, Exercise

Schedule = Sequence[tuple[int, int, float]]


def _fullest(schedule: Schedule, ends: int = 0, which: int = 0) -> tuple[float, int]:
    """Return the peak and its operation. Arrays end so much later; of equal peaks `which`, the first."""
    held = {
        at: sum(size for first, last, size in schedule if first <= at <= last + ends)
        for at in sorted({first for first, _, _ in schedule})
    }
    peak = max(held.values())
    return peak, [at for at, size in held.items() if size == peak][which]


def _two_numbers(answer: Answer, schedule: Schedule) -> tuple[Any, Any]:
    got = answer(list(schedule))
    assert np.shape(got) == (2,), f"Return a peak and an operation; yours is {got!r}."
    return got[0], got[1]


_BEGINNINGS = [37 * i % 300 for i in range(200)]

check_peak_and_operation = Exercise(
    1,
    _fullest,
    {
        "For a small step: weights, inputs of three layers, logits and their gradient, gradients of three layers": (
            [(0, 20, 30), (1, 12, 4), (2, 10, 4), (3, 8, 4), (4, 5, 50), (5, 6, 50), (8, 19, 10), (10, 18, 10)],
        ),
        "For an array that ends in the operation before the next one begins": ([(1, 2, 7), (3, 4, 8), (5, 9, 6)],),
        "For two that meet in one operation, in no order": ([(6, 8, 5), (2, 6, 4), (1, 1, 3)],),
        "For two peaks of the same height, the later one listed first": ([(7, 8, 9), (0, 1, 4), (2, 3, 9)],),
        "For three times the same array": ([(2, 5, 3), (2, 5, 3), (2, 5, 3), (0, 1, 8)],),
        "For 200 arrays": ([(first, first + 7 * first % 40, 1 + 31 * first % 98) for first in _BEGINNINGS],),
    },
    "So a timeline finds its fullest moment, whatever the arrays are.",
    {
        "Return a peak and an operation": lambda s: _fullest(s)[0],
        "That is all of them together: are they all there at once?": lambda s: (sum(size for _, _, size in s), 0),
        "That is one array alone: which others are there at the same operation?": (
            lambda s: max((size, first) for first, _, size in s)
        ),
        "In the operation that is an array's last it is there: something may read it.": partial(_fullest, ends=-1),
        "After its last operation an array is gone, whatever begins in the next one.": partial(_fullest, ends=1),
        "You count arrays; of how many bytes is each?": lambda s: _fullest([(a, b, 1) for a, b, _ in s]),
        "Two arrays may be equal in all three numbers, and are two.": lambda s: _fullest(list(dict.fromkeys(s))),
        "The peak is right, and memory is that full at an earlier operation, too, or not at all at yours.": [
            partial(_fullest, which=-1),
            lambda s: (_fullest(s)[0], max(s, key=lambda array: array[2])[1]),
        ],
    },
    otherwise="Which arrays are there at one and the same operation, and which operation is the first such?",
    ask=_two_numbers,
    told=lambda got, expected, *_: f"you say {got[0]} at operation {got[1]}.",
)

# Of AdamW steps with rematerialised layers and f32 logits, jax 0.10.2 for an H100: peak bytes by model, sequences,
# tokens in each, parts that the batch is read in, the type of weights and moments, and the type of the layers.
PEAKS = {
    ("llama3.2-1b", 3, 8000, 1, "bfloat16", "bfloat16"): 33_812_247_560,
    ("qwen3-0.6b", 2, 12_288, 1, "float32", "bfloat16"): 38_852_549_080,
    ("qwen3-0.6b", 3, 5000, 1, "float32", "float32"): 27_231_130_616,
    ("llama3.2-1b", 8, 4096, 4, "bfloat16", "bfloat16"): 21_368_997_804,
    ("qwen3-0.6b", 8, 4096, 2, "bfloat16", "bfloat16"): 26_884_389_628,
    ("llama3.2-3b", 8, 4096, 2, "bfloat16", "bfloat16"): 51_960_868_780,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What exercise 2 gives of a configuration: enough to predict with, too little to compile."""

    n_params: int
    n_layers: int
    d_model: int
    vocab_size: int
    param_dtype: Any
    compute_dtype: Any

    @classmethod
    def of(cls, name: str, stored: str, computed: str) -> "Sizes":
        """Return those of a known model."""
        whole = LlamaConfig.from_name(name, param_dtype=jnp.dtype(stored), compute_dtype=jnp.dtype(computed))
        return cls(*(getattr(whole, field.name) for field in dataclasses.fields(cls)))


def _tower(
    config: Sizes,
    batch_size: int,
    seq_len: int,
    parts: int,
    *,
    states: float = 3,
    extra: Answer = lambda config, B, parts, logits, inputs: 0,
) -> float:
    """Predict a peak by hand, off by what is given: another number of states of the weights, or extra bytes."""
    tokens = batch_size * seq_len // parts
    logits = 4 * tokens * config.vocab_size
    inputs = config.compute_dtype.itemsize * config.n_layers * tokens * config.d_model
    sums = 4 * config.n_params * (parts > 1)
    named = states * config.param_dtype.itemsize * config.n_params + sums + inputs + 2 * logits
    return named + extra(config, batch_size, parts, logits, inputs)


def _head(config: Sizes) -> int:
    return config.param_dtype.itemsize * config.vocab_size * config.d_model


def _other(**fields: Any) -> Answer:
    return lambda config, *batch: _tower(dataclasses.replace(config, **fields), *batch)


def _extra(extra: Answer) -> Answer:
    return partial(_tower, extra=extra)


def _bytes(answer: Answer, config: Sizes, *batch: int) -> Any:
    try:
        got = answer(config, *batch)
    except (AttributeError, TypeError, ValueError) as error:
        raise AssertionError(
            f"{str(error).splitlines()[0][:99]} ... `config` has here what the text lists, and nothing else: enough "
            "for a multiplication by hand, which is asked for, and not enough for a compiler."
        ) from None
    assert got is not None and got > 10**6, f"Return a number of bytes; yours is {got}."
    return got


def _compiled(config: Sizes, *batch: int) -> int:
    return next(
        peak
        for (name, *rest, stored, computed), peak in PEAKS.items()
        if (Sizes.of(name, stored, computed), *rest) == (config, *batch)
    )


def _falls(answer: Answer) -> str:
    config = Sizes.of("llama3.2-1b", "bfloat16", "bfloat16")
    told = ", ".join(f"{answer(config, 8, 4096, parts) / 2**30:.1f} GiB in {parts}" for parts in (1, 2, 4, 8))
    return f"1B with 8 x 4,096 tokens, by parts: {told}. The tower falls with a part's tokens; the sums stay."


check_peak_in_parts = Exercise(
    2,
    _compiled,
    {
        f"{name} in {stored}, computed in {computed}, {B} x {T:,} tokens, parts: {parts}": (
            Sizes.of(name, stored, computed),
            B,
            T,
            parts,
        )
        for name, B, T, parts, stored, computed in PEAKS
    },
    _falls,
    {
        "Return a number of bytes": lambda *given: _tower(*given) / 2**30,
        "not enough for a compiler": lambda config, *batch: config.replace(n_layers=1),
        "The difference is as large as the gradients of all weights of this part: are they there before its layers' "
        "backward passes?": partial(_tower, states=4),
        "The difference is as large as AdamW's moments: how many for each weight?": partial(_tower, states=1),
        "The difference is as large as one moment: how many has AdamW for each weight?": partial(_tower, states=2),
        "The difference is as large as AdamW's moments once more, or sums of gradients: which type have moments, and "
        "what adds up?": _extra(lambda config, B, parts, *_: 4 * config.n_params * (parts == 1)),
        "The difference is as large as half of weights and moments: in which type are they here?": (
            _other(param_dtype=jnp.dtype("bfloat16"))
        ),
        "The difference is as large as what all sequences but one add: how many does one part read?": (
            lambda config, B, *rest: _tower(config, 1, *rest)
        ),
        "The difference is as large as the layers' inputs: what do rematerialised layers keep?": _extra(
            lambda config, B, parts, logits, inputs: -inputs
        ),
        "The difference is half or all of the layers' inputs: in which type are they kept?": (
            _other(compute_dtype=jnp.dtype("float32"))
        ),
        "The difference is as large as the gradient of the head: is it there before the logits' own is complete?": (
            _extra(lambda config, *_: _head(config))
        ),
        "The difference is as large as the embedding and its moments: is it no weight?": (
            _extra(lambda config, *_: -3 * _head(config))
        ),
        "Is a number of words written into your answer?": _other(vocab_size=128_256),
        "The difference is as large as an array of f32 logits: how many are there at once, with how many bytes a "
        "number?": _extra(lambda config, B, parts, logits, inputs: -logits),
        "The difference is as large as the sums of the gradients: where do they wait while a part's tower stands?": (
            _extra(lambda config, B, parts, *_: -4 * config.n_params * (parts > 1))
        ),
        "The difference is as large as half the sums of the gradients: in which type do they wait?": (
            _extra(lambda config, B, parts, *_: (config.param_dtype.itemsize - 4) * config.n_params * (parts > 1))
        ),
        "The difference is as large as what the other parts add: are their logits and inputs there at the same time?": (
            _extra(lambda config, B, parts, logits, inputs: (parts - 1) * (inputs + 2 * logits))
        ),
        "The difference is as large as the other parts' logits: are they there at the same time?": (
            _extra(lambda config, B, parts, logits, inputs: (parts - 1) * 2 * logits)
        ),
        "The difference is as large as the other parts' inputs: does a layer keep them until the next part?": (
            _extra(lambda config, B, parts, logits, inputs: (parts - 1) * inputs)
        ),
        "Which arrays are alive where forward becomes backward": lambda *given: 1.01 * _tower(*given),
    },
    otherwise="Which arrays are alive where forward becomes backward, how many of each, and of which type?",
    ask=_bytes,
    told=lambda got, peak, *_: f"yours is {(got - peak) / 2**30:+.2f} GiB from the compiler's; a little less is right.",
    rtol=5e-5,
    # What can be named comes to 0.2 to 1.1 % less than the compiler's; the last layer's output may be counted.
    accepts=lambda got, peak: -0.012 * peak < got - peak < 0,
)


def _schedule(
    inputs: Sequence[int],
    gradients: Sequence[int],
    logits: float,
    tiles: int,
    state: int,
    workspace: int,
    *,
    state_begins: int = 0,
    tile: Answer = lambda at, last: (at, at),
    tile_logits: float | None = None,
    read: Answer = lambda at, last: at,
    forwards: bool = False,
    gradient: Answer = lambda at, last: (at, last),
    work: Answer = lambda layer, at, last: [(at, at)],
) -> list[tuple[int, int, float]]:
    """Return the schedule of a step with a tiled loss, or one that is wrong in what is given."""
    layers, last = len(inputs), 2 * len(inputs) + tiles
    rows: list[tuple[int, int, float]] = [(state_begins, last, state)]
    for at in range(layers, layers + tiles):
        rows.append((*tile(at, layers + tiles - 1), 2 * logits * (tile_logits or 1 / tiles)))
    for layer in range(layers):
        at = layers + tiles + layer if forwards else last - 1 - layer
        rows += [(layer, read(at, last), inputs[layer]), (*gradient(at, last), gradients[layer])]
        rows += [(*span, workspace) for span in work(layer, at, last)]
    return rows


def _held(answer: Answer, *sizes: Any) -> list[float]:
    """Return what each operation holds by an answer's schedule: from 0 to the last."""
    last = 2 * len(sizes[0]) + sizes[3]
    found = answer(*(list(size) if isinstance(size, tuple) else size for size in sizes))
    rows = np.asarray(list(found) if isinstance(found, Iterator) else found, float)
    assert rows.ndim == 2 and rows.shape[1] == 3, "Return a list of (first, last, size), as in exercise 1."
    assert rows[:, 1].max() <= last, (
        f"Yours goes on to operation {rows[:, 1].max():.0f}. Count: the forward operations, those of the loss, the "
        f"backward ones, and the optimizer's make {last + 1}, from 0 to {last}."
    )
    return [float(sum(size for first, end, size in rows if first <= at <= end)) for at in range(last + 1)]


def _first_off(
    got: list[float], expected: list[float], inputs: Any, gradients: Any, logits: Any, tiles: int, *_: Any
) -> str:
    names = [f"the forward pass of layer {i}" for i in range(len(inputs))]
    names += [f"tile {i} of the loss" for i in range(tiles)]
    names += [f"the backward pass of layer {i}" for i in reversed(range(len(inputs)))] + ["the optimizer"]
    at = next(at for at, (a, b) in enumerate(zip(got, expected, strict=True)) if abs(a - b) > 1e-5 * max(expected))
    off = got[at] - expected[at]
    return f"in operation {at}, {names[at]}, yours holds {abs(off):g} {'more' if off > 0 else 'less'} than the rules."


def _by_tiles(answer: Answer) -> str:
    inputs, gradients, logits, _, *rest = _STEPS[1]
    peaks = ", ".join(f"{max(_held(answer, inputs, gradients, logits, n, *rest)):g} with {n}" for n in (1, 2, 4, 8))
    return f"The peak of a small step by tiles: {peaks}. Once a layer's moment is the fullest, more tiles gain nothing."


# Sizes of the layers' inputs and gradients, and of all logits; tiles; state; workspace.
_STEPS = (
    ((4, 4, 4), (10, 10, 10), 48, 1, 90, 20),
    ((4, 4, 4), (10, 10, 10), 48, 4, 90, 20),
    ((1, 2, 4, 8), (16, 32, 64, 128), 60, 3, 1000, 300),
    ((7,), (5,), 8, 8, 11, 2),
    ((9, 3), (2, 40), 13, 4, 6, 1),
)


def _but(**wrong: Any) -> Answer:
    return partial(_schedule, **wrong)


check_step_schedule = Exercise(
    3,
    _schedule,
    {f"For {len(step[0])} layers and tiles: {step[3]}": step for step in _STEPS},
    _by_tiles,
    {
        "Return a list of (first, last, size)": lambda *sizes: max(size for _, _, size in _schedule(*sizes)),
        "the optimizer's make": lambda *sizes: [(first + 1, last + 1, size) for first, last, size in _schedule(*sizes)],
        "Weights and moments are there in every operation, the first and the last as well.": _but(state_begins=1),
        "A tile's gradient has the size of the tile, and both are there.": (
            lambda inputs, gradients, logits, *rest: _schedule(inputs, gradients, logits / 2, *rest)
        ),
        "A tile is gone when its operation is over. Does yours wait for the others?": _but(
            tile=lambda at, last: (at, last)
        ),
        "An operation of the loss makes one tile, not all of the logits.": _but(tile_logits=1),
        "All tiles together are all logits and their gradient: is some of them rounded away?": (
            lambda x, dw, logits, tiles, *rest: _schedule(x, dw, 2 * logits // tiles * tiles / 2, tiles, *rest)
        ),
        "All inputs wait for the backward pass, until their own operation has read them, and no longer.": [
            _but(read=lambda at, last: at - 1),
            _but(read=lambda at, last: last),
        ],
        "Gradients come one by one, each in its layer's backward operation, and all of them are there for the "
        "optimizer.": [
            _but(gradient=lambda at, last: (at, at)),
            _but(gradient=lambda at, last: (0, last)),
        ],
        "The last layer comes first in the backward pass.": _but(forwards=True),
        "Workspace is of one layer: it comes with its backward operation and goes with it.": [
            _but(work=lambda layer, at, last: [(layer, layer), (at, at)]),
            _but(work=lambda layer, at, last: [(at, last - 1)]),
        ],
    },
    otherwise="Which inputs are still to be read there, which gradients have been made, and what has been read for the "
    "last time?",
    ask=_held,
    told=_first_off,
)
