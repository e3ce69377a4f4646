"""Find the plan for a model, a chip and a length: estimates propose, the chip's own compiler has the last word."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamem._checks import check_whole
from llamem.llama import LlamaConfig, LoraConfig, Plan
from llamem.llama.quantized import BlockKind
from llamem.memory import GiB, Report
from llamem.planner.asking import Answer, NothingFits, Progress, ask_in_turn, fits
from llamem.planner.candidates import estimates, streamed_estimates
from llamem.planner.estimates import Estimate
from llamem.planner.found import ALIKE, Found, explain
from llamem.planner.host import host_limit
from llamem.planner.question import Question, ask
from llamem.train.settings import Clip

ASKS = 5  # at most, of one search: an answer takes two to ten seconds on an idle machine
FAR_BELOW = 0.9  # a compiled peak below this share of the estimate: faster plans deserve another look
_STEP = 1024  # tokens: the longest context is a multiple


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
    far as its memory (`llamem.compile_report`). What the compiler says corrects the estimates of the others, up and
    down, and the next one is asked about. `mesh` fixes how several chips share the work; None tries ways.
    `compiler=False` trusts the estimate alone, where that chip's compiler is not installed. `progress` is told of each
    question; None for silence.

    `host_bytes`: what the chip's host can hold of a run. Plans that need more are left out, and where nothing else
    fits, and on one chip, layers are updated in the backward pass, and weights wait on the host if they must:
    `Plan(weights="host", update="in_backward")`, which needs `clip="layer"`; frozen weights wait there without. Where
    it is None no plan does that. On GPUs nothing above XLA's pool of host memory is planned.

    Raises NothingFits, a ValueError that names what comes closest; ValueError for bad sizes or an unknown chip;
    ImportError as `llamem.find_chip` does.
    """
    asked: dict[str, Any] = {"mesh": mesh, "clip": clip, "host_bytes": host_bytes, "lora": lora, "quantize": quantize}
    question = ask(config, chip, seq_len, batch_size, compiler=compiler, **asked)
    question.check_length()
    return best_plan(question, compiler, progress)


def best_plan(question: Question, compiler: bool, progress: Progress, factor: float = 1.0) -> Found:
    """Return what `find_plan` does; `factor` multiplies estimates until the compiler has been asked."""
    limit, who = host_limit(question.chip, question.host_bytes)
    try:
        return _search(question, [e for e in estimates(question) if e.host_bytes <= limit], compiler, progress, factor)
    except NothingFits as nothing:
        streamed = [e for e in streamed_estimates(question) if e.fits]
        if not streamed:
            raise
        closest = min(streamed, key=lambda e: e.host_bytes)
        if closest.host_bytes > limit:
            one_by_one = "layers updated one by one, and " if question.lora is None else ""
            raise NothingFits(
                f"{nothing} With {one_by_one}weights on the host it would fit, but {who} has "
                f"{limit / GiB:.1f} GiB and would have to hold {closest.host_bytes / GiB:.1f}.",
                closest,
            ) from None
        if question.clip == "global" and question.lora is None:
            raise NothingFits(
                f"{nothing} It would fit with layers updated one by one: {closest.plan}. Their gradients are clipped "
                "one by one, too: say clip='layer'.",
                closest,
            ) from None
        return _search(question, [e for e in streamed if e.host_bytes <= limit], compiler, progress, factor)


def _search(question: Question, tried: Sequence[Estimate], compiler: bool, progress: Progress, first: float) -> Found:
    capacity = question.chip.capacity_bytes or float("inf")
    by_plan = {e.plan: e for e in tried}
    if not compiler:
        possible = [e for e in tried if e.fits]
        if possible:
            return explain(_fastest(possible), None, tried, 0)

    def choose(answers: Mapping[Plan, Answer]) -> Plan | None:
        if len(answers) == ASKS:
            return None
        best = [by_plan[plan].seconds.total for plan, answer in answers.items() if fits(answer)]
        limit = min(best, default=float("inf")) / ALIKE
        factor = _correction(answers, by_plan) if answers else first
        fitting = [
            e for e in tried if e.plan not in answers and e.peak_bytes * factor <= capacity and e.seconds.total <= limit
        ]
        return _fastest(fitting).plan if fitting else None

    answers = ask_in_turn(choose, question.compile, question.chip.name, progress) if compiler else {}
    found = [by_plan[plan] for plan, answer in answers.items() if fits(answer)]
    if found:
        best = _fastest(found)
        report = answers[best.plan]
        assert isinstance(report, Report)
        return explain(best, report, tried, len(answers))
    errors = [answer for answer in answers.values() if isinstance(answer, str)]
    if errors and len(errors) == len(answers):
        raise RuntimeError(
            f"{question.chip.name}'s compiler gave no answer to any of {len(errors)} plans: {errors[-1]}"
        )
    closest = min(tried, key=lambda e: e.peak_bytes, default=None)
    least = f" The least, by estimate: {closest.peak_bytes / GiB:.2f} GiB, {closest.plan}." if closest else ""
    raise NothingFits(
        f"nothing fits: {question.batch_size} x {question.seq_len:,} tokens on {question.chip.name} "
        f"({capacity / GiB:.2f} GiB), {len(tried)} plans estimated, {len(answers)} of them compiled.{least} Choose "
        "fewer tokens, a larger chip or more of them.",
        closest,
    )


def _correction(answers: Mapping[Plan, Answer], estimated: Mapping[Plan, Estimate]) -> float:
    """Return what to multiply estimates by, after the compiler's answers: above 1 where one was refused that should
    have fitted; below 1 where the last peak was far below its estimate.
    """
    ratios = [
        (answer.peak_bytes / estimated[plan].peak_bytes, answer.fits)
        for plan, answer in answers.items()
        if isinstance(answer, Report)
    ]
    refused = max((ratio for ratio, good in ratios if not good), default=None)
    if refused is not None:
        return max(1.0, refused)
    return ratios[-1][0] if ratios and ratios[-1][0] < FAR_BELOW else 1.0


def _fastest(fitting: Sequence[Estimate]) -> Estimate:
    """Return the plainest of those that are as fast as the fastest: fewest tools, then the least memory."""
    limit = ALIKE * min(e.seconds.total for e in fitting)
    alike = [e for e in fitting if e.seconds.total <= limit]
    return min(alike, key=lambda e: (len(e.plan.changes), e.peak_bytes))


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
    check_whole("batch_size", batch_size)
    asked: dict[str, Any] = {"mesh": mesh, "clip": clip, "host_bytes": host_bytes, "lora": lora, "quantize": quantize}
    first = ask(config, chip, _STEP, batch_size, compiler=compiler, **asked)
    unit = _STEP * (first.mesh.context if first.mesh is not None else 1)
    most = max(1, config.max_seq_len // unit)

    def of(count: int) -> Question:
        return first.replace(seq_len=count * unit)

    def longest_by_estimate(low: int, high: int, factor: float) -> int:
        capacity = (first.chip.capacity_bytes or float("inf")) / factor
        limit = host_limit(first.chip, host_bytes)[0]

        def possible(count: int) -> bool:
            may_stream = clip == "layer" or lora is not None
            tried = estimates(of(count)) + (streamed_estimates(of(count)) if may_stream else ())
            return any(e.peak_bytes <= capacity and e.host_bytes <= limit for e in tried)

        return bisect(possible, low, high)

    count, too_long, factor = longest_by_estimate(0, most + 1, 1.0), most + 1, 1.0
    best, shorter_by = None, 32  # an estimate that was too low is first taken to be so by little, then by more
    while count >= 1:
        try:
            best = best_plan(of(count), compiler, progress, factor)
        except NothingFits:
            too_long, shorter = count, count - max(1, count // shorter_by)
            shorter_by = max(2, shorter_by // 2)
            if best is not None and shorter <= best.seq_len // unit:
                break
            count = shorter
            continue
        if best.report is None or (ratio := best.report.peak_bytes / best.estimate.peak_bytes) >= factor * FAR_BELOW:
            break
        factor = ratio
        longer = longest_by_estimate(count, too_long, factor)
        if longer - count <= max(1, count // 32):
            break
        count = longer
    if best is None:
        raise NothingFits(f"nothing fits on {first.chip.name}: not even {unit:,} tokens.")
    return best


def bisect(possible: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest count from `low`, which is possible, to below `high`, which is not, to about 1.5 %."""
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low
