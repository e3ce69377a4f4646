"""What a search for a plan comes back with: a plan that a person can act on."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from llamem._extras import import_extra
from llamem.layers import Policy
from llamem.llama import LoraConfig, Plan
from llamem.memory import GiB, Report
from llamem.memory.show import Shown, Table
from llamem.planner.candidates import frontier
from llamem.planner.estimates import Estimate, estimate_plan
from llamem.planner.question import has_cudnn
from llamem.planner.sums import LINES

ALIKE = 1.02  # times within 2 %: of plans as fast as that the plainest is taken
_LITTLE = 1.10  # a plan within 10 % of the time is told where it saves much memory


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
        return self.estimate.seq_len

    @property
    def batch_size(self) -> int:
        """Sequences of one step, over all chips."""
        return self.estimate.batch_size

    @property
    def peak_bytes(self) -> int:
        """The compiler's peak; the estimate's where no compiler was asked."""
        return self.report.peak_bytes if self.report else self.estimate.peak_bytes

    @property
    def code(self) -> str:
        """The lines of Python that train with this plan: `config` is the model's, `text`, `chats` a file or folder.

        Adapters are trained over the weights in `folder`.
        """
        question, config = self.estimate.question, self.estimate.config
        clip = "" if question.clip == "global" else f", clip={question.clip!r}"
        settings = (
            f"settings = llamem.TrainSettings(batch_size={question.batch_size}, seq_len={question.seq_len}{clip})\n"
        )
        if question.lora is None:
            return (
                f"{settings}llamem.train.train(config, llamem.train.load_corpus(text), settings, 'run', "
                f"plan=llamem.{self.plan})"
            )
        bits = f", quantize={question.quantize!r}" if question.quantize else ""
        types = f"dtype={config.param_dtype.name!r}, compute_dtype={config.compute_dtype.name!r}{bits}"
        return (
            f"{settings}plan = llamem.{self.plan}\n"
            f"model = llamem.load_pretrained(folder, {types}, plan=plan)\n"
            "data = llamem.train.load_chats(chats, llamem.train.Tokenizer(folder))\n"
            f"lora = llamem.{_lora_in_code(question.lora)}\n"
            "llamem.train.train(model.config, data, settings, 'run', init=model, lora=lora, plan=plan)"
        )

    def parts_shown(self) -> Iterable[str | Table]:
        """Return why this plan, what it does, the plans beside it, and the lines that run it."""
        yield self.why
        shown = [self.estimate, *(e for e in self.alternatives if e.plan != self.plan)]
        head = ("plan", "GiB, estimated", "", "host GiB", "s a step, estimated", "tokens/s", "hours for 1e9 tokens")
        yield "Found first, then what else there is:"
        yield Table(head, [self._row(e) for e in shown])
        yield self.code

    def _row(self, e: Estimate) -> tuple[str, ...]:
        capacity = e.capacity_bytes or float("inf")
        verdict = "fits" if e.fits else f"{(e.peak_bytes - capacity) / GiB:.2f} too many"
        if e is self.estimate and self.report is not None:
            verdict = f"compiled: {self.report.peak_bytes / GiB:.2f}"
        speed = (f"{e.tokens_per_second:,.0f}", f"{1e9 / e.tokens_per_second / 3600:,.0f}")
        sizes = f"{e.peak_bytes / GiB:.2f}", verdict, f"{e.host_bytes / GiB:.2f}", f"{e.seconds.total:.2f}"
        return repr(e.plan), *sizes, *speed

    def plot(self) -> Any:
        """Return a figure: estimated memory by category for the plan and what else there is, beside the chip's limit.

        The compiler's peak of the plan is a diamond. Needs matplotlib: ImportError says how to install it.
        """
        plt = import_extra("matplotlib.pyplot", "Found.plot")
        shown = [self.estimate, *(e for e in self.alternatives if e.plan != self.plan)][:8]
        fig, ax = plt.subplots(figsize=(8.5, 0.5 * len(shown) + 1.8), layout="constrained")
        starts = [0.0] * len(shown)
        colours = plt.get_cmap("tab20").colors
        for colour, name in zip(colours, LINES, strict=False):
            sizes = [sum(line.bytes for line in e.lines if line.name == name) / GiB for e in shown]
            if any(sizes):
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


def in_words(plan: Plan) -> str:
    """Return what a plan does, for who does not know its fields."""
    policy = plan.policy
    saved = policy.save if isinstance(policy, Policy) else None
    names = f"keeps {' and '.join(saved)} of" if saved else "keeps the input of"
    words = [f"{names} each layer and computes the rest again" if plan.remat == "nothing" or saved else ""]
    if not words[0]:
        words = ["keeps everything" if plan.remat is None else f"keeps what the policy {plan.remat!r} says"]
    if plan.mode == "nested":
        words.append("keeps the inputs of groups of layers only")
    if plan.offload:
        words.append(f"sends {' and '.join(plan.offload)} to the host and back")
    if plan.head_groups > 1:
        words.append(f"computes attention in {plan.head_groups} groups of heads")
    if plan.mlp_tiles > 1:
        words.append(f"computes feed-forwards in {plan.mlp_tiles} tiles of tokens")
    if plan.loss_tiles is None:
        words.append("makes all logits at once")
    else:
        words.append("cuts the logits into tiles" + ("" if plan.loss_tiles == "auto" else f", {plan.loss_tiles}"))
    homes = [name for name in ("moments", "weights") if getattr(plan, name) == "host"]
    if homes:
        words.append(f"keeps {' and '.join(homes)} on the host")
    if plan.update == "in_backward":
        words.append("updates each layer as soon as its gradient is there")
    if plan.mesh.devices > 1:
        words.append("shares by " + " x ".join(f"{name} {size}" for name, size in plan.mesh.axes.items()))
    return ", ".join(words)


def _lora_in_code(lora: LoraConfig) -> str:
    """Return the call that makes these adapters, without what it fills in by itself."""
    defaults = LoraConfig(ranks=lora.ranks)
    names = (
        "ranks",
        *(name for name in ("alphas", "target_modules") if getattr(lora, name) != getattr(defaults, name)),
    )
    return f"LoraConfig({', '.join(f'{name}={getattr(lora, name)!r}' for name in names)})"


def _types(one: Estimate) -> str:
    """Return what is trained, and in which types everything is."""
    p, c, question = one.config.param_dtype.name, one.config.compute_dtype.name, one.question
    if question.lora is None:
        return f"Weights, gradients and both moments are {p}, products {c}."
    ranks = ", ".join(map(str, question.lora.ranks))
    frozen = (
        f"Frozen layers are in {question.quantize}, tables and norms" if question.quantize else "Frozen weights are"
    )
    return f"Adapters of rank {ranks} and both moments are float32. {frozen} {p}, products {c}."


def _kernel_of_nvidia(one: Estimate) -> list[str]:
    """Return what NVIDIA's own attention would save a plan in plain JAX; no compiler has it without the GPU."""
    if one.plan.attention != "auto" or one.plan.mesh.context > 1 or not has_cudnn(one.config, one.chip):
        return []
    seconds = estimate_plan(one.question, one.plan.replace(attention="cudnn")).seconds.total
    if seconds * _LITTLE > one.seconds.total:
        return []
    return [
        "Attention is plain JAX in these seconds. With NVIDIA's own kernel, attention='cudnn', they would be "
        f"{seconds:.2f} (estimated). Its library comes with the GPU: on the GPU, compile that plan with chip='local'."
    ]


def explain(one: Estimate, report: Report | None, tried: Sequence[Estimate], asked: int) -> Found:
    """Return what was found, why in words, and the plans beside it."""
    capacity = one.capacity_bytes
    of = f" of {capacity / GiB:.2f}" if capacity else ""
    peak, who = (report.peak_bytes, "compiled") if report else (one.peak_bytes, "estimated, not compiled")
    lines = [
        f"{one.plan}: {peak / GiB:.2f}{of} GiB on {one.chip.name} ({who}), {one.host_bytes / GiB:.2f} GiB on the host, "
        f"{one.seconds.total:.2f} s a step (estimated) for {one.batch_size} x {one.seq_len:,} tokens.",
        f"It {in_words(one.plan)}. {_types(one)}",
    ]
    faster = [e for e in tried if e.seconds.total < one.seconds.total / ALIKE]
    if faster:
        least = min(faster, key=lambda e: e.peak_bytes)
        lines.append(
            f"Of {len(tried):,} plans {len(faster)} would be faster by more than 2 %; the smallest of them, "
            f"{least.plan}, needs {least.peak_bytes / GiB:.2f} GiB by estimate."
        )
    else:
        lines.append(f"No plan of {len(tried)} is faster by more than 2 %: memory is no constraint here.")
    near = [e for e in tried if e.seconds.total <= _LITTLE * one.seconds.total and e.host_bytes <= one.host_bytes]
    thrifty = min(near, key=lambda e: e.peak_bytes, default=one)
    if thrifty.peak_bytes < 0.9 * one.peak_bytes:
        slower = thrifty.seconds.total / one.seconds.total - 1
        lines.append(
            f"It takes memory for speed: {thrifty.plan} would need {(one.peak_bytes - thrifty.peak_bytes) / GiB:.2f} "
            f"GiB less, for {max(slower, 0):.1%} more time (estimated)."
        )
    if one.link_bytes and one.seconds.host_link > one.seconds.products + one.seconds.attention:
        lines.append(
            f"The link to the host takes {one.seconds.host_link:.2f} of these seconds, more than the arithmetic: more "
            "tokens in a step would share it."
        )
    lines += _kernel_of_nvidia(one)
    best = [e for e in frontier(tried) if e.peak_bytes <= (capacity or float("inf")) * 1.5]
    return Found(one.plan, one, report, "\n".join(lines), tuple(best), asked)
