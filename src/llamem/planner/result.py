"""What a search for a plan comes back with: a plan that a person can act on."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxmem.common.checks import import_extra
from jaxmem.common.printing import Shown, Table
from jaxmem.report import GiB, Report
from llamem.layers.remat import Policy
from llamem.llama.plan import Plan
from llamem.planner.estimates import Estimate

SPEEDS = ("s a step, roofline", "tokens/s", "hours for 1e9 tokens")
ALIKE = 1.02  # times within 2 %: of plans as fast as that the plainest is taken
_FULL = 0.95  # of what a chip offers a program: more is said to be close


@dataclasses.dataclass(frozen=True, repr=False)
class Found(Shown):
    """A plan that the chip's compiler accepts, what it costs, and why it was taken.

    `report` is the compiler's answer, None where it was not asked; `estimate` what had been expected of it.
    `alternatives` are other plans, none of which is beaten in both memory and time, fastest first: by estimate, not
    compiled. `asked` is how many plans the compiler was asked about.
    """

    plan: Plan
    estimate: Estimate
    report: Report | None
    why: str
    alternatives: tuple[Estimate, ...]
    asked: int

    @property
    def seq_len(self) -> int:
        """Tokens of one sequence."""
        return self.estimate.question.seq_len

    @property
    def peak_bytes(self) -> int:
        """The compiler's peak; the estimate's where no compiler was asked."""
        return self.report.peak_bytes if self.report else self.estimate.peak_bytes

    def save(self, file: str | os.PathLike, model: str = "") -> Path:
        """Write the plan, and what it was found for, for `Plan.load` and `scale/train.py --plan`; return the file.

        `model`: a name of `llamem.PRESETS`, or the path of a config.json. Raise FileExistsError where the file is there
        and is no plan.
        """
        q = self.estimate.question
        beside: dict[str, Any] = {
            "model": model,
            "chip": q.chip.name,
            "peak_bytes": self.peak_bytes,
            "by": self.report.compiler if self.report else "estimate, not compiled",
            "seq_len": q.seq_len,
            "batch_size": q.batch_size,
            "clip": q.clip,
            "param_dtype": q.config.param_dtype.name,
            "compute_dtype": q.config.compute_dtype.name,
        }
        if q.lora is not None:
            beside |= {"lora": dataclasses.asdict(q.lora), "quantize": q.quantize}
        return self.plan.save(file, **beside)

    @property
    def code(self) -> str:
        """The lines of Python that train with this plan, of the model whose `config` it is; adapters over its weights.

        The files and the folder are to be your own.
        """
        q = self.estimate.question
        settings = (
            f"settings = llamem.TrainSettings(batch_size={q.batch_size}, seq_len={q.seq_len}, clip={q.clip!r})\n"
            f"plan = llamem.{self.plan}\n".replace("Policy(", "llamem.Policy(")
        )
        if q.lora is None:
            return settings + (
                "text = llamem.train.load_corpus('your text.txt')\n"
                "llamem.runs.train(config, text, settings, 'run', plan=plan)"
            )
        types = f"dtype={q.config.param_dtype.name!r}, compute_dtype={q.config.compute_dtype.name!r}"
        return settings + (
            f"model = llamem.load_pretrained('your model', {types}, quantize={q.quantize!r}, plan=plan)\n"
            "chats = llamem.train.load_chats('your chats.jsonl', llamem.text.Tokenizer('your model'))\n"
            f"lora = llamem.{q.lora}\n"
            "llamem.runs.train(model.config, chats, settings, 'run', init=model, lora=lora, plan=plan)"
        )

    def parts_shown(self) -> Iterable[str | Table]:
        """Return why this plan, what it does, the plans beside it, and the lines that run it."""
        yield self.why
        head = ("plan", "GiB, estimated", "", "host GiB", *SPEEDS)
        yield "Found first, then what else there is:"
        yield Table(head, [self._row(e) for e in (self.estimate, *self.alternatives)])
        yield self.code

    def _row(self, e: Estimate) -> tuple[str, ...]:
        verdict = "fits" if e.fits else f"{(e.peak_bytes - (e.capacity_bytes or 0)) / GiB:.2f} too many"
        if e is self.estimate and self.report is not None:
            plain = ", attention in plain JAX" if e.question.stands_in(e.plan) else ""
            verdict = f"compiled: {self.report.peak_bytes / GiB:.2f}{plain}"
        return repr(e.plan), f"{e.peak_bytes / GiB:.2f}", verdict, f"{e.host_bytes / GiB:.2f}", *speeds_shown(e)

    def plot(self) -> Any:
        """Return a figure: estimated memory by category for the plan and what else there is, beside the chip's limit.

        The compiler's peak of the plan is a diamond. Needs matplotlib: ImportError says how to install it.
        """
        plt = import_extra("matplotlib.pyplot", "Found.plot")
        shown = (self.estimate, *self.alternatives)[:8]
        fig, ax = plt.subplots(figsize=(8.5, 0.5 * len(shown) + 1.8), layout="constrained")
        names, starts = dict.fromkeys(line.name for e in shown for line in e.lines if line.bytes), [0.0] * len(shown)
        for colour, name in zip(plt.get_cmap("tab20").colors, names, strict=False):
            sizes = [sum(line.bytes for line in e.lines if line.name == name) / GiB for e in shown]
            ax.barh(range(len(shown)), sizes, left=starts, color=colour, edgecolor="white", label=name)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        if self.report is not None:
            ax.plot(self.report.peak_bytes / GiB, 0, "D", color="black", label="compiled")
        if self.estimate.capacity_bytes:
            ax.axvline(self.estimate.capacity_bytes / GiB, color="black", linestyle="--", label="the chip's limit")
        ax.set_yticks(range(len(shown)), [f"{e.plan!r}"[5:-1] or "defaults" for e in shown], fontsize=8)
        ax.invert_yaxis()
        ax.set(xlabel="GiB at the peak, estimated", title=f"{self.estimate.chip.name}, {self.seq_len:,} tokens")
        fig.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        return fig


def speeds_shown(e: Estimate) -> tuple[str, str, str]:
    """Return the cells of a table under `SPEEDS`."""
    speed = e.tokens_per_second
    return f"{e.seconds.total:.2f}", f"{speed:,.0f}", f"{1e9 / speed / 3600:,.0f}"


def explain(chosen: Estimate, report: Report | None, tried: Sequence[Estimate], asked: int) -> Found:
    """Return what was found, why in words, and the plans beside it."""
    of = f" of {chosen.capacity_bytes / GiB:.2f}" if chosen.capacity_bytes else ""
    peak, basis = (report.peak_bytes, "compiled") if report else (chosen.peak_bytes, "estimated, not compiled")
    seconds, question = chosen.seconds, chosen.question
    lines = [
        f"{chosen.plan}: {peak / GiB:.2f}{of} GiB on {chosen.chip.name} ({basis}), "
        f"{chosen.host_bytes / GiB:.2f} GiB on the host, {seconds.total:.2f} s a step (estimated) for "
        f"{question.batch_size} x {question.seq_len:,} tokens.",
        f"It {in_words(chosen.plan)}. {_types(chosen)}",
    ]
    if chosen.capacity_bytes and peak > _FULL * chosen.capacity_bytes:
        lines.append(
            f"That leaves {(chosen.capacity_bytes - peak) / GiB:.2f} GiB for all that is beside the step: what the "
            "runtime takes for itself, the next batch, other arrays of yours. If a run dies of it, take fewer tokens."
        )
    faster = [e for e in tried if e.seconds.total < seconds.total / ALIKE]
    if faster:
        least = min(faster, key=lambda e: e.peak_bytes)
        lines.append(
            f"Of {len(tried):,} plans {len(faster)} would be faster by more than 2 %; the smallest of them, "
            f"{least.plan}, needs {least.peak_bytes / GiB:.2f} GiB by estimate."
        )
    else:
        lines.append(f"No plan of {len(tried)} is faster by more than 2 %: memory is no constraint here.")
    if chosen.link_bytes and seconds.host_link > seconds.products + seconds.attention:
        lines.append(
            f"The link to the host takes {seconds.host_link:.2f} of these seconds, more than the arithmetic: more "
            "tokens in a step would share it."
        )
    if chosen.plan.attention == "cudnn" and chosen.chip.absent:
        lines.append(
            "Attention is NVIDIA's own kernel in these seconds. Its library comes with the GPU: what is compiled for "
            "one that is not here has attention in plain JAX, attention='tiled', and the memory that this needs."
        )
    others: list[Estimate] = []
    for e in sorted(tried, key=lambda e: (round(e.seconds.total, 6), e.peak_bytes)):
        if not others or e.peak_bytes < others[-1].peak_bytes:
            others.append(e)
    room = 1.5 * (chosen.capacity_bytes or float("inf"))
    others = [e for e in others if e.peak_bytes <= room and e is not chosen]
    return Found(chosen.plan, chosen, report, "\n".join(lines), tuple(others), asked)


def in_words(plan: Plan) -> str:
    """Return what a plan does, for who does not know its fields."""
    saved = plan.policy.save if isinstance(plan.policy, Policy) else ()
    homes = [name for name in ("moments", "weights") if getattr(plan, name) == "host"]
    words = {
        f"keeps {' and '.join(saved)} of each layer and computes the rest again": saved,
        "keeps the input of each layer and computes the rest again": plan.remat == "nothing",
        "keeps everything": plan.remat is None,
        f"keeps what the policy {plan.remat!r} says": not saved and plan.remat not in (None, "nothing"),
        "keeps the inputs of groups of layers only": plan.mode == "nested",
        f"sends {' and '.join(plan.offload)} to the host and back": plan.offload,
        "computes attention in NVIDIA's kernel": plan.attention == "cudnn",
        f"computes attention in {plan.head_groups} groups of heads": plan.head_groups > 1,
        f"computes feed-forwards in {plan.mlp_tiles} tiles of tokens": plan.mlp_tiles > 1,
        "makes all logits at once": plan.loss_tiles is None,
        f"cuts the logits into tiles{'' if plan.loss_tiles == 'auto' else f', {plan.loss_tiles}'}": plan.loss_tiles,
        f"keeps {' and '.join(homes)} on the host": homes,
        "updates each layer as soon as its gradient is there": plan.update == "in_backward",
        "shares by " + " x ".join(f"{name} {size}" for name, size in plan.mesh.axes.items()): plan.mesh.devices > 1,
    }
    return ", ".join(text for text, so in words.items() if so)


def _types(estimate: Estimate) -> str:
    """Return what is trained, and in which types everything is."""
    question = estimate.question
    p, c = question.config.param_dtype.name, question.config.compute_dtype.name
    if question.lora is None:
        return f"Weights, gradients and both moments are {p}, products {c}."
    ranks, kind = ", ".join(map(str, question.lora.ranks)), question.quantize
    frozen = f"Frozen layers are in {kind}, tables and norms" if kind else "Frozen weights are"
    return f"Adapters of rank {ranks} and both moments are float32. {frozen} {p}, products {c}."
