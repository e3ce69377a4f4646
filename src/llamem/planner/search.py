"""Find the plan for a model, a chip and a length: estimates propose, the chip's own compiler has the last word.

Which plans are worth a thought is plain enumeration, every one estimated.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from jaxmem.chips.chip import PINNED_POOL_BYTES, Chip, host_memory_limit
from jaxmem.chips.names import chip_called, find_chip
from jaxmem.fitting import Answer, NothingFits, Progress, ask
from jaxmem.report import GiB, Report
from llamem.adapters.lora import LoraConfig
from llamem.layers.attention import Implementation
from llamem.layers.remat import Policy
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import MeshShape, Plan
from llamem.planner.estimates import Estimate, estimate_plan
from llamem.planner.result import ALIKE, Found, explain
from llamem.planner.sizes import Question, Sizes, has_cudnn
from llamem.quantized.blocks import BlockKind
from llamem.train.settings import Clip

Fields = list[dict[str, Any]]  # of `Plan`, for each setting that is tried
KEPT: Fields = [  # what is kept in groups is kept twice
    {"remat": "nothing"},
    {"remat": "attn"},
    {"remat": Policy(save=("attn_out",))},
    {"remat": "qkv_attn"},
    {"remat": "minimal"},
    {"remat": None},
    {"mode": "nested"},
]
OFFLOADS: Fields = [{}, {"offload": ("block_in",)}, {"offload": ("block_in", "attn_out")}]
# Where no plan fits with weights on the chip: layers updated one by one, then moments, then weights on the host.
STREAMED: Fields = [
    {"update": "in_backward"},
    {"update": "in_backward", "moments": "host"},
    {"update": "in_backward", "moments": "host", "weights": "host"},
]
COLUMNS = 512  # about so many of the vocabulary in a tile, where its number is not left to `choose_tiles`


@functools.lru_cache(maxsize=8)
def all_estimates(question: Question, streamed: bool = False) -> tuple[Estimate, ...]:
    """Return an estimate of every plan that is tried. The last few answers are kept.

    `streamed`: of plans that update layers in the backward pass, or fetch them from the host, or both. There are none
    for several chips, which share the weights out instead, and for a host that nobody told of. Raises ValueError where
    the sizes divide among the chips in no way.
    """
    if streamed and (question.chip.devices > 1 or question.host_bytes is None):
        return ()
    estimates, why = [], None
    for mesh in _meshes(question):
        # Nothing is faster than NVIDIA's own kernel; what splits sequences has none.
        attention = "cudnn" if has_cudnn(question.config, question.chip) and mesh.context == 1 else "auto"
        try:
            Sizes(question, Plan(mesh=mesh, attention=attention))
        except ValueError as error:  # a mesh that does not divide the sizes: the first, FSDP alone, is told of
            why = why or error
            continue
        plans = _plans(question.config, mesh, attention, question.lora is None, streamed)
        estimates += [estimate_plan(question, plan) for plan in plans]
    if why is not None and not estimates:
        raise why
    return tuple(estimates)


def _meshes(question: Question) -> Iterator[MeshShape]:
    """Yield ways to lay a model on chips: FSDP first, then with tensor or context parallelism beside it.

    With both where sequences are fewer than chips: where there is one for each, FSDP with one of them is never slower
    by the estimates of 70B and 405B at 8,192 to 131,072 tokens.
    """
    devices = question.chip.devices
    if question.mesh is not None:
        yield question.mesh
    elif question.quantize:  # blocks are not split
        yield MeshShape(data=devices)
    else:
        sizes = [size for size in range(1, devices + 1) if devices % size == 0]
        for other, tensor in product(sizes, reversed(sizes)):
            if other % tensor:
                continue
            mesh = MeshShape(fsdp=devices // other, tensor=tensor, context=other // tensor)
            if min(mesh.tensor, mesh.context) == 1 or question.batch_size < devices:
                yield mesh


@functools.lru_cache(maxsize=32)
def _plans(
    config: LlamaConfig, mesh: MeshShape, attention: Implementation, trained: bool, streamed: bool
) -> tuple[Plan, ...]:
    """Return the plans with all combinations of a few settings of each tool, but those that exclude each other.

    Adapters' moments are too small to move, and where the head is frozen tiles of tokens are the fastest.
    """
    groups: Fields = [{"head_groups": n} for n in (1, 2, 4, 8) if config.n_kv_heads // mesh.tensor % n == 0]
    rows: Fields = [{"mlp_tiles": n} for n in (1, 4, 16, 64)]
    tiles = {"loss_tiles": max(1, -(-config.vocab_size // mesh.tensor // COLUMNS))}
    if mesh.tensor > 1:
        losses: Fields = [{}, tiles]
    else:
        losses = [{}, {**tiles, "loss_axis": "vocab"}, {"loss_tiles": None}] if trained else [{}, {"loss_tiles": None}]
    if streamed:
        settings = [STREAMED if trained else [{"weights": "host"}], groups, rows, OFFLOADS[:2], losses]
    else:
        settings = [KEPT, groups, rows, OFFLOADS, [{}, {"moments": "host"}] if trained else [{}], losses]
    plans = []
    for choice in product(*settings):
        chosen = {name: value for setting in choice for name, value in setting.items()}
        fields: dict[str, Any] = {"mesh": mesh, "attention": attention, **chosen}
        if fields.get("remat", "") is None and (fields["head_groups"], fields["mlp_tiles"]) != (1, 1):
            continue
        try:
            plans.append(Plan(**fields))
        except ValueError:
            continue
    return tuple(plans)


ASKS = 5  # at most, of one search: an answer takes two to ten seconds on an idle machine
FAR_BELOW = 0.9  # a compiled peak below this share of the estimate: faster plans deserve another look
_STEP = 1024  # tokens: the longest context is a multiple
_GPU_POOL_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # in GiB: XLA shifts it by 30 bits


def find_plan(
    config: LlamaConfig,
    chip: str = "v5e-1",
    *,
    seq_len: int,
    batch_size: int = 1,
    mesh: Mapping[str, int] | None = None,
    compiler: bool = True,
    progress: Progress = print,
    host_bytes: int | None = None,
    clip: Clip = "global",
    lora: LoraConfig | None = None,
    quantize: BlockKind | None = None,
) -> Found:
    """Return the fastest plan, by estimate, that the chip's compiler accepts for an AdamW step of this model and batch.

    `lora`: adapters that are trained over the frozen model, `llamem.LoraConfig(ranks=(16,))`, instead of all of it;
    `quantize`: the blocks that its matrices are then in, "q4_0", "q4_1" or "q8_0", as `llamem.load_pretrained` has it.

    Every combination of a few settings of each tool is estimated; of those that should fit the fastest is compiled as
    far as its memory (`jaxmem.compile_report`). What the compiler says corrects the estimates of the others, up and
    down, and the next one is asked about. `mesh` fixes how several chips share the work; None tries ways.
    `compiler=False` trusts the estimate alone, where that chip's compiler is not installed. `progress` is told of each
    question; None for silence.

    `host_bytes`: what the chip's host can hold of a run. Plans that need more are left out, and where nothing else
    fits, and on one chip, layers are updated in the backward pass, and weights wait on the host if they must:
    `Plan(weights="host", update="in_backward")`, which needs `clip="layer"`; frozen weights wait there without. Where
    it is None no plan does that. On GPUs nothing above XLA's pool of host memory is planned.

    Raises NothingFits, a ValueError that names what comes closest; ValueError for bad sizes or an unknown chip;
    ImportError as `jaxmem.find_chip` does.
    """
    target, shape = find_chip(chip) if compiler else chip_called(chip), None if mesh is None else MeshShape.of(mesh)
    question = Question(config, target, seq_len, batch_size, shape, clip, host_bytes, lora, quantize)
    return best_plan(question, compiler, progress)


def longest_context(
    config: LlamaConfig,
    chip: str = "v5e-1",
    *,
    batch_size: int = 1,
    mesh: Mapping[str, int] | None = None,
    compiler: bool = True,
    progress: Progress = print,
    host_bytes: int | None = None,
    clip: Clip = "global",
    lora: LoraConfig | None = None,
    quantize: BlockKind | None = None,
) -> Found:
    """Return the plan for the longest sequences, in multiples of 1,024 up to `config.max_seq_len`, that fit a chip.

    Bisection by estimate, then the compiler; what it refuses shortens the sequence, and a peak far below its estimate
    lengthens it. Arguments and errors as `find_plan`.
    """
    target, shape = find_chip(chip) if compiler else chip_called(chip), None if mesh is None else MeshShape.of(mesh)
    unit = _STEP * (shape.context if shape else 1)
    first = Question(config, target, unit, batch_size, shape, clip, host_bytes, lora, quantize)
    limit, _ = host_limit(target, host_bytes)

    def of(count: int) -> Question:
        return dataclasses.replace(first, seq_len=count * unit)

    def possible(count: int) -> bool:
        tried = all_estimates(of(count))
        if clip == "layer" or lora is not None:
            tried += all_estimates(of(count), streamed=True)
        room = target.capacity_bytes or float("inf")
        return any(e.peak_bytes * factor <= room and e.host_bytes <= limit for e in tried)

    best, factor, doubt = None, 1.0, 1 / 32  # an estimate too low is first taken to be so by little, then by more
    fitting, too_long = 0, config.max_seq_len // unit + 1
    while True:
        count, high = fitting, too_long
        while high - count > max(1, count // 64):
            middle = (count + high) // 2
            count, high = (middle, high) if possible(middle) else (count, middle)
        if count - fitting <= fitting // 32:
            break
        try:
            best, fitting = best_plan(of(count), compiler, progress, factor), count
        except NothingFits:
            too_long, factor, doubt = count, factor * (1 + doubt), 2 * doubt
            continue
        if best.report is None or best.report.peak_bytes >= factor * FAR_BELOW * best.estimate.peak_bytes:
            break
        factor = best.report.peak_bytes / best.estimate.peak_bytes
    return best or best_plan(first, compiler, progress, factor)  # which says why nothing fits


def best_plan(question: Question, compiler: bool, progress: Progress, factor: float = 1.0) -> Found:
    """Return what `find_plan` does; `factor` multiplies estimates until the compiler has been asked."""
    limit, source = host_limit(question.chip, question.host_bytes)

    def search(estimates: Sequence[Estimate]) -> Found:
        return _search(question, [e for e in estimates if e.host_bytes <= limit], compiler, progress, factor)

    try:
        return search(all_estimates(question))
    except NothingFits as nothing:
        told = question.host_bytes is not None
        asked = question if told else dataclasses.replace(question, host_bytes=2**60)
        streamed = [e for e in all_estimates(asked, streamed=True) if e.fits]
        if not streamed:
            raise
        closest = min(streamed, key=lambda e: e.host_bytes)
        if closest.host_bytes > limit:
            one_by_one = "layers updated one by one, and " if question.lora is None else ""
            why = (
                f"With {one_by_one}weights on the host it would fit, but {source} has {limit / GiB:.1f} GiB and would "
                f"have to hold {closest.host_bytes / GiB:.1f}."
            )
        elif not told:
            by_layer = ", and clip='layer'" if question.lora is None else ""
            why = (
                f"It would fit as {closest.plan}, with {closest.host_bytes / GiB:.1f} GiB on the host: say how much "
                f"that can hold, host_bytes or --host-gib{by_layer}."
            )
        elif question.clip == "global" and question.lora is None:
            why = (
                f"It would fit with layers updated one by one: {closest.plan}. Their gradients are clipped one by one, "
                "too: say clip='layer'."
            )
        else:
            return search(streamed)
        raise NothingFits(f"{nothing} {why}") from None


def host_limit(chip: Chip, given: int | None) -> tuple[float, str]:
    """Return how many bytes a run may keep on a chip's host, and what says so; infinity where nothing does.

    `given` is what the user says that the host holds. On GPUs XLA's pool of pinned memory is a bound, and for the chip
    at hand this machine's memory, or its container's.
    """
    limits = [(float(given), "the host")] if given is not None else []
    if chip.platform == "cuda":
        says = os.environ.get(_GPU_POOL_GB, "")
        pool = int(says) * 2**30 if says.isdigit() else PINNED_POOL_BYTES
        limits.append((float(pool), f"XLA's pool of host memory for GPUs, unless {_GPU_POOL_GB} says more,"))
    memory = None if chip.absent or chip.platform == "cpu" else host_memory_limit()
    if memory:
        limits.append((float(memory), "this machine, or its container,"))
    return min(limits, default=(float("inf"), ""))


def _search(question: Question, tried: Sequence[Estimate], compiler: bool, progress: Progress, first: float) -> Found:
    """Return the fastest that fits of the estimated plans: by estimate, or by the compiler, asked in turn."""
    capacity = question.chip.capacity_bytes or float("inf")
    by_plan = {e.plan: e for e in tried}
    least = min(tried, key=lambda e: e.peak_bytes, default=None)

    answers: dict[Plan, Answer] = {}
    accepted: dict[Plan, Report] = {}

    def next_one() -> Estimate | None:
        peaks = {plan: answer.peak_bytes for plan, answer in answers.items() if isinstance(answer, Report)}
        ratios = [peak / by_plan[plan].peak_bytes for plan, peak in peaks.items()]
        factor = max(1.0, *ratios) if ratios else first  # estimates were too low, or by far too high
        if ratios and max(ratios) < FAR_BELOW:
            factor = ratios[-1]
        limit = min((by_plan[plan].seconds.total for plan in accepted), default=float("inf")) / ALIKE
        new = [e for e in tried if e.plan not in answers and e.seconds.total <= limit]
        fitting = [e for e in new if e.peak_bytes * factor <= capacity]
        if not fitting and not accepted and answers:  # the errors of those asked need not be its own
            fitting = [e for e in new if e is least and e.fits]
        return _fastest(fitting) if fitting and len(answers) < ASKS else None

    while compiler and (estimate := next_one()):
        plan = estimate.plan
        if report := ask(plan, partial(question.compile, plan), answers, question.chip.name, progress):
            accepted[plan] = report
    candidates = [e for e in tried if (e.plan in accepted if compiler else e.fits)]
    if candidates:
        best = _fastest(candidates)
        return explain(best, accepted.get(best.plan), tried, len(answers))
    errors = [answer for answer in answers.values() if isinstance(answer, str)]
    if errors and len(errors) == len(answers):
        raise RuntimeError(
            f"{question.chip.name}'s compiler gave no answer to any of {len(errors)} plans: {errors[-1]}"
        )
    closest = f" The least, by estimate: {least.peak_bytes / GiB:.2f} GiB, {least.plan}." if least else ""
    raise NothingFits(
        f"nothing fits: {question.batch_size} x {question.seq_len:,} tokens on {question.chip.name} "
        f"({capacity / GiB:.2f} GiB), {len(tried)} plans estimated, {len(answers)} of them compiled.{closest} Choose "
        "fewer tokens, a larger chip or more of them."
    )


def _fastest(fitting: Sequence[Estimate]) -> Estimate:
    """Return the plainest of those that are as fast as the fastest: fewest tools, then the least memory."""
    limit = ALIKE * min(e.seconds.total for e in fitting)
    alike = [e for e in fitting if e.seconds.total <= limit]
    return min(alike, key=lambda e: (len(e.plan.changes), e.peak_bytes))
