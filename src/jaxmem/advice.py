"""What to do about a program's peak: at most five remedies, each with what it saves and the line that does it.

A remedy that needs nobody's help is compiled: another donation, another sharding, scans whose bodies are checkpointed.
Others change a model's own lines, and are estimated: as the timeline would be without the arrays that they spare.
"""

import contextlib
import dataclasses
import functools
import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from jaxmem.chips.chip import GLOBALS
from jaxmem.common.checks import few
from jaxmem.common.printing import Shown, Table, size_text
from jaxmem.notes import argument_name, donated_with, not_donated, whole_beside_cut
from jaxmem.reading.hlo import unnumbered
from jaxmem.reading.provenance import Provenance
from jaxmem.reading.timeline import Span, Timeline
from jaxmem.report import Report
from jaxmem.tracing.arguments import Leaf
from jaxmem.tracing.flops import summed_over
from jaxmem.tracing.jaxprs import Scan, control_flow, equations

_MOST = 5  # remedies
_LEAST = 0.02  # of the peak, that a remedy has to save
_TILES = 16  # that a loss over the vocabulary is cut into, for an estimate
_FEW = 3  # layers: equal arrays of fewer are no stack


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One thing to do, and by how many bytes the peak falls if nothing else is done.

    `compiled`: the chip's compiler said so, of the changed program; else it is an estimate. `arrays` are the largest
    that it is about, each with its size and line. `code` is what to write.
    """

    cause: str
    bytes: int
    compiled: bool
    arrays: tuple[str, ...]
    code: str


@dataclasses.dataclass(frozen=True, repr=False)
class Advice(Shown):
    """Remedies for a report's peak, the largest saving first. What two of them save together is less than the sum."""

    peak_bytes: int
    remedies: tuple[Remedy, ...]

    def __iter__(self) -> Iterator[Remedy]:
        return iter(self.remedies)

    def __len__(self) -> int:
        return len(self.remedies)

    def __getitem__(self, number: int) -> Remedy:
        return self.remedies[number]

    def parts_shown(self) -> Iterable[str | Table]:
        """Return each remedy: what it saves and how that is known, what is wrong, which arrays, what to write."""
        if not self.remedies:
            yield f"of {size_text(self.peak_bytes)} at the peak no remedy known here saves a fiftieth."
        for number, remedy in enumerate(self.remedies, 1):
            known = "compiled" if remedy.compiled else "estimated"
            lines = [
                f"{number}. saves {size_text(remedy.bytes)} of {size_text(self.peak_bytes)} ({known}): {remedy.cause}"
            ]
            lines += [f"   {array}" for array in remedy.arrays]
            yield "\n".join([*lines, f"   do: {remedy.code}"])


@dataclasses.dataclass(frozen=True)
class Study:
    """A report, and what its advice is made of: arguments, what they are for, the traced program.

    `ask(donate_argnums=, shardings=, checkpointed=)` compiles the program again, changed.
    """

    report: Report
    leaves: Sequence[Leaf]
    provenance: Provenance
    traced: jex_core.ClosedJaxpr
    ask: Callable[..., Report]

    def saved(self, **how: Any) -> int | None:
        """Return by how much the peak of the changed program is lower; None where it cannot be compiled."""
        try:
            return self.report.peak_bytes - self.ask(**how).peak_bytes
        except (ImportError, RuntimeError, ValueError, TypeError):
            return None

    @functools.cached_property
    def schedule(self) -> Timeline:
        """The timeline. Raises LookupError where there is none."""
        if self.report.timeline is None:
            raise LookupError(self.report.no_timeline)
        return self.report.timeline

    def saved_without(self, shares: Callable[[Span], float], more: Any = 0) -> int:
        """Estimate what is saved if a share of each array were gone, and `more` bytes, for each step or all, came."""
        return int(self.schedule.peak_bytes - np.max(self.schedule.curve_without(shares) + more))

    def of(self, *categories: str) -> list[Leaf]:
        """Return the arguments of these categories on the device."""
        pairs = zip(self.leaves, self.provenance.categories, strict=True)
        return [leaf for leaf, category in pairs if category in categories and not leaf.on_host]


def with_advice(report: Report, study: Callable[..., Study]) -> Report:
    """Return the report, which makes its advice when that is asked for."""
    vars(report)["_advise"] = lambda: advise(study(report))
    return report


def advise(study: Study) -> Advice:
    """Return the remedies that save a fiftieth of the peak or more."""
    found = []
    for remedy in REMEDIES:
        with contextlib.suppress(LookupError):  # without a timeline some have nothing to look at
            found.append(remedy(study))
    worth = [one for one in found if one and one.bytes > max(_LEAST * study.report.peak_bytes, 2**20)]
    return Advice(study.report.peak_bytes, tuple(sorted(worth, key=lambda one: -one.bytes)[:_MOST]))


def _rows(spans: Iterable[Span], most: int = 3) -> tuple[str, ...]:
    """Return the largest arrays in words, equal ones of layers as one."""
    rows = sorted(_alike(spans), key=lambda group: -sum(span.bytes for span in group))[:most]
    return tuple(
        f"{len(group)} x {group[0].shape}, {size_text(sum(span.bytes for span in group))}: "
        f"{unnumbered(group[0].operation) if len(group) > 1 else group[0].operation} {group[0].source}".rstrip()
        for group in rows
    )


def _arguments(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    sizes: dict[str, int] = defaultdict(int)
    for leaf in leaves:
        sizes[argument_name(leaf)] += leaf.bytes
    return tuple(f"`{name}`, {size_text(size)}" for name, size in sizes.items())


def donate(study: Study) -> Remedy | None:
    """Find a step whose new weights and moments lie beside the old ones."""
    if not (kept := not_donated(study.leaves, study.provenance)):
        return None
    numbers = donated_with(study.leaves, kept)
    saved = study.saved(donate_argnums=numbers)
    size = sum(leaf.bytes for leaf in kept) if saved is None else saved
    code = f"jax.jit(step, donate_argnums={numbers}), and compile_report(..., donate_argnums={numbers})"
    cause = "what the step replaces is not donated, and lies in memory twice"
    return Remedy(cause, size, saved is not None, _arguments(kept), code)


def shard_like_weights(study: Study) -> Remedy | None:
    """Find moments that lie whole on each chip, beside weights that are cut."""
    whole = whole_beside_cut(study.leaves)
    saved = study.saved(shardings=whole) if whole else None
    if saved is None:
        return None
    code = (
        "moments = optax.tree_map_params(optimizer, lambda m, w: jax.ShapeDtypeStruct(m.shape, m.dtype, "
        "sharding=w.sharding), moments, weights); of arrays, optimizer.init of weights that are cut"
    )
    arrays = _arguments([study.leaves[i] for i in whole])
    return Remedy("arrays lie whole on each chip, and their like are cut over the mesh", saved, True, arrays, code)


@contextlib.contextmanager
def scans_checkpointed() -> Iterator[None]:
    """Trace with each body of `jax.lax.scan` under `jax.checkpoint`, in this thread alone."""
    plain, here = jax.lax.scan, threading.get_ident()

    @functools.wraps(plain)
    def scan(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
        body = jax.checkpoint(f, prevent_cse=False) if threading.get_ident() == here else f
        return plain(body, *args, **options)

    # What was traced before stays traced, but for other settings: these mean the same.
    precision = jax.config.jax_default_matmul_precision or "default"  # pyrefly: ignore[missing-attribute]
    with GLOBALS, jax.default_matmul_precision(precision):
        jax.lax.scan = scan  # pyrefly: ignore[bad-assignment]
        try:
            yield
        finally:
            jax.lax.scan = plain


def checkpoint_scans(study: Study) -> Remedy | None:
    """Find scans over layers that keep what each layer computes."""
    flows = [control_flow(eqn) for eqn, _ in equations(study.traced.jaxpr)]
    kept = [span for span in study.schedule.at_peak() if span.category in ("residuals", "logits")]
    if not any(isinstance(flow, Scan) and flow.length >= _FEW for flow in flows) or not kept:
        return None
    saved = study.saved(checkpointed=True)
    code = (
        "jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, weights), or llamem.apply_stack(layer, weights, x, "
        'remat="nothing"); jaxmem.keep_what_fits finds a policy that keeps more'
    )
    cause = "a scan keeps what each of its turns computes for the backward pass"
    return Remedy(cause, saved, True, _rows(kept), code) if saved else None


def checkpoint_list(study: Study) -> Remedy | None:
    """Find layers in a Python list that keep what each of them computes."""
    timeline = study.schedule
    groups = _alike(span for span in timeline.buffers if span.category == "residuals" and span.space == "device")
    stacks = [group for group in groups if len(group) >= _FEW]
    size = sum(span.bytes for group in stacks for span in group)
    # Of a scan the residuals are stacked: what is there several times are queries, keys and values.
    if not timeline.passes or 2 * size <= sum(span.bytes for group in groups for span in group):
        return None
    by_count: dict[int, int] = defaultdict(int)
    for group in stacks:
        by_count[len(group)] += sum(span.bytes for span in group)
    layers = max(by_count, key=lambda count: by_count[count])
    waiting = _waiting(study)
    kept = {id(span) for group in (*stacks, waiting) for span in group}
    largest = max(group[0].bytes for group in stacks)
    # What enters a layer is kept: of its arrays, the smallest that is no mere vector for each token.
    inputs = layers * min(group[0].bytes for group in stacks if group[0].bytes > largest / 64)
    # A layer computed again lies there while the backward pass is in the layers, and not yet in that of the loss.
    last = [span.last for span in max(stacks, key=lambda group: sum(span.bytes for span in group))]
    start, end = min(last), max(last) + 1
    gradients = timeline.by_category().get("gradients", np.zeros(timeline.steps))
    more = np.full(timeline.steps, float(inputs))
    more[start:end] += size / layers
    waits = np.zeros(timeline.steps)
    for span in waiting:
        waits[span.first : span.last + 1] += span.bytes
    more += np.minimum(waits, max((span.bytes for span in waiting), default=0))  # one at a time
    stacked = (
        'layers = llamem.stack_layers(layers); x = llamem.apply_stack(layer, layers, x, remat="nothing"), both lines: '
        "a scan without remat keeps more than the list"
    )
    code = (
        "layer = jax.checkpoint(layer) before the loop (nnx.remat, nn.remat, eqx.filter_checkpoint of modules); or, "
        f"quicker to compile, with all gradients at once, {stacked}"
    )
    if study.report.chip.platform == "cpu":  # whose compiler undoes checkpoints outside of loops
        code = stacked
        # In a scan all layers' gradients have their place from its beginning.
        all_gradients = sum(leaf.bytes for leaf in study.of("weights"))
        more[start:end] += np.maximum(all_gradients - gradients[start:end], 0)
    saved = study.saved_without(lambda span: float(id(span) in kept), more)
    cause = f"a list of {layers} layers keeps what each of them computes for the backward pass"
    return Remedy(cause, saved, False, _rows(span for group in stacks for span in group), code)


def _waiting(study: Study) -> list[Span]:
    """Return gradients of layers' activations, as many as layers, which compilers may keep until a weight's is made.

    That of a checkpointed layer is made at once.
    """
    sizes = {math.prod(leaf.shape.shape) for leaf in study.of("weights")}
    made = [span for span in study.schedule.buffers if span.category == "gradients" and span.space == "device"]
    groups = _alike(span for span in made if math.prod(_axes(span)) not in sizes)
    return [span for group in groups if len(group) >= _FEW for span in group]


def tile_loss(study: Study) -> Remedy | None:
    """Find a loss that makes all logits."""
    logits = [span for span in study.schedule.at_peak() if span.category == "logits"]
    if not logits:
        return None
    share = 1 - 1 / _TILES
    saved = study.saved_without(lambda span: share * (span.category == "logits"))
    code = "llamem.tiled_cross_entropy(hidden, head, targets), in place of hidden @ head.T and the loss of it"
    return Remedy("the loss makes all logits", saved, False, _rows(logits), code)


def attend_in_a_kernel(study: Study) -> Remedy | None:
    """Find plain attention, which writes the scores of all pairs of tokens."""
    widths = {size for leaf in study.of("weights") for size in leaf.shape.shape}
    products = _products_of_pairs(study.traced)
    sizes_of_scores = {out.size for out, _, _ in products}

    def is_scores(span: Span) -> bool:
        axes = _axes(span)
        computed = span.argument is None and span.category not in ("logits", "gradients", "output")
        if not computed or len(axes) < 3 or not axes[-1] == axes[-2] >= 256:
            return False
        # Tokens and a layer's width may be equal by chance: then, of one layer, it is as large as such a product.
        return axes[-1] not in widths or any(
            math.prod(axes[first:]) in sizes_of_scores for first in range(len(axes) - 2)
        )

    scores = [span for span in study.schedule.at_peak() if is_scores(span)]
    if not scores:
        return None
    kernel = {
        "tpu": 'jax.experimental.pallas.ops.tpu.splash_attention, in Llama Plan(attention="splash")',
        "cuda": 'jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")',
    }
    platform = study.report.chip.platform
    code = kernel.get(platform, "a kernel on the accelerator (Splash, cuDNN)")
    # In their place a kernel keeps a row of output and its logsumexp for each query, and a TPU's pads heads to 128.
    tokens = _axes(scores[0])[-1]
    width, item = min(((w, n) for out, w, n in products if out.shape.count(tokens) > 1), default=(128, 2))
    lanes = -(-width // 128) * 128 if platform == "tpu" else width
    a_query = item * (lanes + 3 * (lanes - width)) + 4
    sizes: Counter[tuple[str, str]] = Counter()
    for span in scores:
        sizes[_kind(span)] += span.bytes
    largest = sizes.most_common(1)[0][0]  # others are of the same pairs

    def gone(span: Span) -> float:
        if not is_scores(span):
            return 0.0
        kept = a_query * math.prod(_axes(span)[:-1]) if _kind(span) == largest else 0
        return max(1 - kept / span.bytes, 0.0)

    saved = study.saved_without(gone)
    cause = "attention writes the scores of all pairs of tokens"
    code += ", or llamem.layers.attention.flash_attention"
    return Remedy(cause, saved, False, _rows(scores), code)


def _axes(span: Span) -> list[int]:
    match = re.fullmatch(r"\w+\[([\d,]+)\]", span.shape)
    return [int(size) for size in match[1].split(",")] if match else []


def _kind(span: Span) -> tuple[str, str]:
    """Return what a span and those of other layers have in common."""
    return span.shape, unnumbered(span.operation)


def _alike(spans: Iterable[Span]) -> list[list[Span]]:
    """Return spans of one kind together."""
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        groups[_kind(span)].append(span)
    return list(groups.values())


def _products_of_pairs(traced: jex_core.ClosedJaxpr) -> list[tuple[Any, int, int]]:
    """Return each matrix product of pairs of tokens: its result, the width of a head, the bytes of its numbers.

    They have batch axes, sequences and heads; an MLP's product has none.
    """
    found = []
    for eqn, _ in equations(traced.jaxpr):
        width = summed_over(eqn)
        if width and any(eqn.params["dimension_numbers"][1]):
            out: Any = eqn.outvars[0].aval
            if any(size >= 256 and out.shape.count(size) > 1 for size in out.shape):
                found.append((out, width, eqn.invars[0].aval.dtype.itemsize))  # pyrefly: ignore[missing-attribute]
    return found


def _path(leaf: Leaf) -> str:
    """Return an array's path inside of its argument; where that says nothing, the argument's name."""
    inside = leaf.name.removeprefix(argument_name(leaf))
    return inside if re.search("[a-z]", inside) else leaf.name


def narrower_moments(study: Study) -> Remedy | None:
    """Find first moments in float32 of weights in bfloat16."""
    narrow = {leaf.shape.shape for leaf in study.of("weights") if leaf.shape.dtype.itemsize == 2}
    wide = [leaf for leaf in study.of("optimizer") if str(leaf.shape.dtype) == "float32"]
    wide = [leaf for leaf in wide if leaf.shape.shape in narrow]
    first = [leaf for leaf in wide if re.search(r"\b(mu|m|trace)\b", _path(leaf))]
    size = sum(leaf.bytes for leaf in first) // 2
    code = "optax.adamw(..., mu_dtype=jnp.bfloat16): it changes the numbers; the second moment stays in float32"
    cause = "first moments are in float32, and their weights in bfloat16"
    return Remedy(cause, size, False, _arguments(first), code) if first else None


def narrower_weights(study: Study) -> Remedy | None:
    """Find weights in float32, such as an embedding, of a model whose others are in bfloat16."""
    weights = study.of("weights")
    narrow = sum(math.prod(leaf.shape.shape) for leaf in weights if leaf.shape.dtype.itemsize == 2)
    wide = [leaf for leaf in weights if str(leaf.shape.dtype) == "float32"]
    if narrow < sum(math.prod(leaf.shape.shape) for leaf in weights) / 4 or not wide:
        return None
    shapes = {leaf.shape.shape for leaf in wide}
    moments = [leaf for leaf in study.of("optimizer") if leaf.shape.shape in shapes and leaf.shape.dtype.itemsize == 4]
    texts = {f"f32[{','.join(map(str, shape))}]" for shape in shapes}
    made = [span for span in study.schedule.at_peak() if span.argument is None and span.shape in texts]
    size = sum(leaf.bytes for leaf in (*wide, *moments)) // 2 + sum(span.bytes for span in made) // 2
    names = few([f"`{leaf.name}`" for leaf in sorted(wide, key=lambda leaf: -leaf.bytes)])
    code = f"make {names} in bfloat16, with their moments (param_dtype=jnp.bfloat16): it changes the numbers"
    cause = "weights in float32 of a model in bfloat16, with their gradients and moments"
    return Remedy(cause, size, False, _arguments(wide) + _rows(made, 2), code)


def fewer_copies(study: Study) -> Remedy | None:
    """Find what an optimizer keeps beside two moments of each weight: sums of gradients, averages of weights."""
    shapes = {leaf.shape.shape for leaf in study.of("weights")}
    copies = [leaf for leaf in study.of("optimizer") if leaf.shape.shape in shapes and leaf.shape.shape]
    extra = [leaf for leaf in copies if not re.search(r"\b(mu|nu|m|v|trace)\b", _path(leaf))]
    if not extra or len(copies) <= 2 * len(shapes):
        return None
    sums = any("acc" in _path(leaf) for leaf in extra)
    code = (
        "without optax.MultiSteps: the whole batch in one step with remat and a tiled loss, or a jax.lax.scan over its "
        "parts inside of the step, whose sums are gone after it"
        if sums
        else "keep the average in bfloat16, or in the host's memory (memory_kind='pinned_host') between its updates"
    )
    size = sum(leaf.bytes for leaf in extra)
    return Remedy("the optimizer keeps more than two moments of each weight", size, False, _arguments(extra), code)


REMEDIES: tuple[Callable[[Study], Remedy | None], ...] = (
    donate,
    shard_like_weights,
    tile_loss,
    checkpoint_scans,
    checkpoint_list,
    attend_in_a_kernel,
    narrower_moments,
    narrower_weights,
    fewer_copies,
)
