"""The plan for a model, a chip and a length: the estimate proposes, the chip's compiler disposes."""

from collections.abc import Callable, Mapping, Sequence

from llamem.llama import LlamaConfig, MeshShape, Plan
from llamem.memory import CHIPS, Chip, GiB, Report, compile_report
from llamem.memory.chips import find_chip
from llamem.planner.candidates import estimates, streamed_estimates, words
from llamem.planner.estimates import Estimate, chip_called
from llamem.planner.found import ALIKE, Found, NothingFits, explained
from llamem.train import TrainSettings, abstract_step
from llamem.train.settings import Clip

__all__ = ["Found", "NothingFits", "ask", "find_plan", "largest_batch", "longest_context", "smallest_chip"]

ASKS = 5  # at most, of one search: an answer takes about ten seconds on an idle machine
_STEP = 1024  # tokens: the longest context is a multiple
Progress = Callable[[str], None] | None


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
) -> Found:
    """The fastest plan, by estimate, that the chip's compiler accepts for an AdamW step of this model and batch.

    Every combination of a few settings of each tool is estimated; of those that should fit the fastest is compiled as
    far as its memory (`llamem.compile_report`). What the compiler says of a plan that does not fit corrects the
    estimate of the others, and the next one is asked about. `mesh` fixes how several chips share the work; None tries
    ways. `compiler=False` trusts the estimate alone, where that chip's compiler is not installed. `progress` is told
    of each question; None for silence.

    `host_bytes`: what the chip's host can hold of a run. Plans that need more are left out, and where nothing else
    fits, and on one chip, weights go to the host, or layers are updated in the backward pass, or both:
    `Plan(weights="host", update="in_backward")`. Without it no plan does that. `clip`: see `llamem.TrainSettings`; with
    "global" an update in the backward pass takes two of them, or gradients go to the host and come back.

    Raises NothingFits, a ValueError that names what comes closest; ValueError for bad sizes or an unknown chip;
    ImportError as `llamem.find_chip` does.
    """
    on = _chip(chip, compiler)
    _check(config, seq_len, batch_size)
    tried = _for_host(estimates(config, on, seq_len, batch_size, mesh), host_bytes)
    try:
        return _search(config, on, tried, seq_len, batch_size, compiler, progress, clip)
    except NothingFits as nothing:
        streamed = () if host_bytes is None else streamed_estimates(config, on, seq_len, batch_size, clip)
        if not streamed:
            raise
        possible = _for_host(streamed, host_bytes)
        if not any(e.fits for e in possible):
            closest = min((e for e in streamed if e.fits), key=lambda e: e.host_bytes, default=None)
            if closest is None:
                raise
            raise NothingFits(
                f"{nothing} With weights on the host it would fit, but the host has {(host_bytes or 0) / GiB:.1f} GiB "
                f"and would have to hold {closest.host_bytes / GiB:.1f}.",
                closest,
            ) from None
        return _search(config, on, possible, seq_len, batch_size, compiler, progress, clip)


def _for_host(tried: Sequence[Estimate], host_bytes: int | None) -> Sequence[Estimate]:
    return [e for e in tried if host_bytes is None or e.host_bytes <= host_bytes]


def ask(
    config: LlamaConfig, plan: Plan, chip: str, *, seq_len: int, batch_size: int = 1, clip: Clip = "global"
) -> Report:
    """What the chip's compiler says of one AdamW step under a plan, its state donated. See `llamem.compile_report`."""
    settings = TrainSettings(batch_size=batch_size, seq_len=seq_len, clip=clip)
    step, state, batch = abstract_step(config, settings, plan)
    return compile_report(step, state, batch, donate_argnums=(0,), chip=chip)


def _search(
    config: LlamaConfig,
    chip: Chip,
    tried: Sequence[Estimate],
    seq_len: int,
    batch_size: int,
    compiler: bool,
    progress: Progress,
    clip: Clip = "global",
) -> Found:
    capacity = chip.capacity_bytes or 0
    correction, refused, asked = 1.0, [], 0
    while asked < ASKS:
        fitting = [e for e in tried if e.peak_bytes * correction <= capacity and e.plan not in refused]
        if not fitting:
            break
        one = _fastest(fitting)
        if not compiler:
            return explained(one, None, tried, asked)
        asked += 1
        if progress is not None:
            progress(f"asking {chip.name}'s compiler, {asked} of at most {ASKS}: {words(one.plan)}")
        try:
            report = ask(config, one.plan, chip.name, seq_len=seq_len, batch_size=batch_size, clip=clip)
        except RuntimeError as error:  # the compiler died: nothing is known of its memory
            report, said = None, str(error).splitlines()[0]
        else:
            said = f"{report.peak_bytes / GiB:.2f} GiB, {one.peak_bytes / GiB:.2f} estimated"
        if progress is not None:
            progress(f"  {said}: {'fits' if report and report.fits else 'does not fit'}")
        if report is not None and report.fits:
            return explained(one, report, tried, asked)
        refused.append(one.plan)
        if report is not None:
            correction = max(correction, report.peak_bytes / one.peak_bytes)
    closest = min(tried, key=lambda e: e.peak_bytes, default=None)
    least = f" The least, by estimate: {closest.peak_bytes / GiB:.2f} GiB, {words(closest.plan)}." if closest else ""
    raise NothingFits(
        f"nothing fits: {batch_size} x {seq_len:,} tokens on {chip.name} ({capacity / GiB:.2f} GiB), {len(tried)} "
        f"plans estimated, {asked} of them compiled.{least} Choose fewer tokens, a larger chip or more of them.",
        closest,
    )


def _fastest(fitting: Sequence[Estimate]) -> Estimate:
    """The plainest of those that are as fast as the fastest: fewest tools, then the least memory."""
    limit = ALIKE * min(e.seconds.total for e in fitting)
    alike = [e for e in fitting if e.seconds.total <= limit]
    return min(alike, key=lambda e: (words(e.plan).count("="), e.peak_bytes))


def longest_context(
    config: LlamaConfig,
    chip: str = "v5e-1",
    *,
    batch_size: int = 1,
    mesh: Mapping[str, int] | None = None,
    compiler: bool = True,
    progress: Progress = print,
) -> Found:
    """The longest sequences, in multiples of 1,024 up to `config.max_seq_len`, for which a plan is found on a chip.

    Bisection by estimate, then the compiler; what it refuses shortens the sequence. Arguments and errors as
    `find_plan`.
    """
    on = _chip(chip, compiler)
    unit = _STEP * (MeshShape.of(mesh).context if mesh is not None else 1)
    most = max(1, config.max_seq_len // unit)

    def tried(count: int) -> Sequence[Estimate]:
        return estimates(config, on, count * unit, batch_size, mesh)

    def search(count: int) -> Found:
        return _search(config, on, tried(count), count * unit, batch_size, compiler, progress)

    return _largest(tried, search, most, f"{unit:,} tokens", on)


def largest_batch(
    config: LlamaConfig,
    chip: str = "v5e-1",
    *,
    seq_len: int,
    mesh: Mapping[str, int] | None = None,
    compiler: bool = True,
    progress: Progress = print,
) -> Found:
    """The most sequences of `seq_len` tokens, at most 4,096, for which a plan is found. Otherwise `longest_context`."""
    on = _chip(chip, compiler)
    _check(config, seq_len, 1)
    shape = MeshShape.of(mesh) if mesh is not None else MeshShape(fsdp=on.devices)
    unit = shape.data * shape.fsdp

    def tried(count: int) -> Sequence[Estimate]:
        return estimates(config, on, seq_len, count * unit, mesh)

    def search(count: int) -> Found:
        return _search(config, on, tried(count), seq_len, count * unit, compiler, progress)

    return _largest(tried, search, max(1, 4096 // unit), f"{unit} sequences", on)


def _largest(
    tried: Callable[[int], Sequence[Estimate]], search: Callable[[int], Found], most: int, unit: str, chip: Chip
) -> Found:
    """The largest count for which `search` finds a plan, from those for which an estimate fits."""
    capacity = chip.capacity_bytes or 0

    def fits(count: int) -> bool:
        return any(e.peak_bytes <= capacity for e in tried(count))

    low, high = 0, most + 1  # fits at low, not at high
    while high - low > max(1, low // 64):  # to about 1.5 %: finer than the estimate knows
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    part = 32  # an estimate that was too low is first taken to be so by little, then by more
    while low >= 1:
        try:
            return search(low)
        except NothingFits:
            low, part = low - max(1, low // part), max(2, part // 2)
    raise NothingFits(f"nothing fits on {chip.name}: not even {unit}.", None)


def smallest_chip(
    config: LlamaConfig, *, seq_len: int, batch_size: int = 1, compiler: bool = True, progress: Progress = print
) -> Found:
    """A plan on the smallest of `llamem.CHIPS`, by the memory of all its chips together, on which one is found.

    Chips whose compiler is not installed are left out. Raises NothingFits where none is enough.
    """
    _check(config, seq_len, batch_size)
    for chip in sorted(CHIPS.values(), key=lambda t: ((t.capacity_bytes or 0) * t.devices, t.devices)):
        try:
            return find_plan(
                config, chip.name, seq_len=seq_len, batch_size=batch_size, compiler=compiler, progress=progress
            )
        except (NothingFits, ImportError) as error:
            if progress is not None:
                progress(f"{chip.name}: {str(error).splitlines()[0]}")
    raise NothingFits(f"{batch_size} x {seq_len:,} tokens fit none of the {len(CHIPS)} chips.", None)


def _chip(name: str, compiler: bool) -> Chip:
    known = chip_called(name)
    return find_chip(name) if compiler else known


def _check(config: LlamaConfig, seq_len: int, batch_size: int) -> None:
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1.")
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len:,} is beyond this model's max_seq_len={config.max_seq_len:,}: shorten the sequence, or "
            "config.replace(max_seq_len=..., rope_scaling=...)."
        )
