"""Which plans are worth a thought, and which of them no other beats: plain enumeration, every one estimated."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Literal

from llamem.layers import Policy
from llamem.llama import LlamaConfig, MeshShape, Plan
from llamem.memory import Chip
from llamem.planner.estimates import Estimate, estimate
from llamem.train.settings import Clip

# Of each tool the settings that are tried, the plainest first: of two equal plans the plainer one is taken.
KEPT: tuple[tuple[Any, str | Policy | None], ...] = (  # mode and remat; what is kept in groups is kept twice
    ("scan", "nothing"),
    ("scan", "attn"),
    ("scan", Policy(save=("attn_out",))),
    ("scan", "qkv_attn"),
    ("scan", "minimal"),
    ("scan", None),
    ("nested", "nothing"),
)
ATTENTION_TILES = (1, 2, 4, 8)
MLP_TILES = (1, 4, 16, 64)
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("block_in",), ("block_in", "attn_out"))
MOMENTS: tuple[Literal["device", "host"], ...] = ("device", "host")
# About how many columns of the vocabulary a tile holds, or the plain loss; None: as `choose_tiles` says.
LOSS_TILES: tuple[tuple[str, int] | None, ...] = (None, ("vocab", 512), ("plain", 0))


def meshes(config: LlamaConfig, chip: Chip, seq_len: int, batch_size: int) -> Iterator[MeshShape]:
    """Ways to lay a model and its batch on a chip's chips: FSDP first, then with tensor or context parallelism."""
    n = chip.devices
    for other in (size for size in range(1, n + 1) if n % size == 0):
        for axis in ("tensor", "context") if other > 1 else ("tensor",):
            mesh = MeshShape(fsdp=n // other, **{axis: other})
            heads = config.n_kv_heads % mesh.tensor == 0 and config.n_heads % mesh.tensor == 0
            sizes = config.d_ff % mesh.tensor == 0 and config.vocab_size % mesh.tensor == 0
            width = config.d_model % (mesh.fsdp * mesh.context) == 0
            length = mesh.context == 1 or seq_len % (2 * mesh.context) == 0
            if heads and sizes and width and length and batch_size % mesh.fsdp == 0:
                yield mesh


def plans(config: LlamaConfig, chip: Chip, seq_len: int, batch_size: int, mesh: MeshShape | None) -> Iterator[Plan]:
    """The plans that are tried, without those that exclude themselves."""
    for lies in [mesh] if mesh is not None else meshes(config, chip, seq_len, batch_size):
        head_groups = [n for n in ATTENTION_TILES if (config.n_kv_heads // lies.tensor) % n == 0]
        choices = product(KEPT, head_groups, MLP_TILES, OFFLOADS, MOMENTS, LOSS_TILES)
        for (mode, remat), heads, rows, offload, moments, loss in choices:
            if remat is None and (heads, rows) != (1, 1):
                continue
            try:
                yield Plan(
                    mode=mode,
                    remat=remat,
                    head_groups=heads,
                    mlp_tiles=rows,
                    offload=offload,
                    moments=moments,
                    mesh=lies,
                    **_loss(loss, config, lies),
                )
            except ValueError:  # tools that exclude each other
                continue


def _loss(choice: tuple[str, int] | None, config: LlamaConfig, mesh: MeshShape) -> dict[str, Any]:
    if choice is None:
        return {}
    axis, size = choice
    if axis == "plain":
        return {} if mesh.tensor > 1 else {"loss_tiles": None}
    count = max(1, -(-config.vocab_size // mesh.tensor // size))
    return {"loss_tiles": count} | ({} if mesh.tensor > 1 else {"loss_axis": axis})


def estimates(
    config: LlamaConfig,
    chip: Chip,
    seq_len: int,
    batch_size: int,
    mesh: MeshShape | Mapping[str, int] | None = None,
) -> tuple[Estimate, ...]:
    """An estimate of every plan that is tried, in the order in which they are. The last few answers are kept."""
    return _estimates(config, chip, seq_len, batch_size, None if mesh is None else MeshShape.of(mesh))


@functools.lru_cache(maxsize=8)
def _estimates(
    config: LlamaConfig, chip: Chip, seq_len: int, batch_size: int, mesh: MeshShape | None
) -> tuple[Estimate, ...]:
    tried = plans(config, chip, seq_len, batch_size, mesh)
    return tuple(estimate(config, plan, chip.name, seq_len=seq_len, batch_size=batch_size) for plan in tried)


def streamed_estimates(
    config: LlamaConfig, chip: Chip, seq_len: int, batch_size: int, clip: Clip
) -> tuple[Estimate, ...]:
    """Estimates of plans that update layers in the backward pass, or fetch them from the host, or both.

    None for several chips, which share the weights out instead.
    """
    if chip.devices > 1:
        return ()
    heads = [n for n in ATTENTION_TILES if config.n_kv_heads % n == 0]
    ways: list[dict[str, Any]] = [
        {"update": "in_backward"},
        {"update": "in_backward", "moments": "host"},
        {"update": "in_backward", "moments": "host", "weights": "host"},
    ]
    if clip == "global":  # gradients on the host as well: no second backward pass for their norm
        ways.append({"moments": "host", "weights": "host"})
    choices = product(ways, heads, MLP_TILES, ((), ("block_in",)), LOSS_TILES)
    plans = [
        Plan(head_groups=attention, mlp_tiles=rows, offload=offload, **way, **_loss(loss, config, MeshShape()))
        for way, attention, rows, offload, loss in choices
    ]
    return tuple(estimate(config, p, chip.name, seq_len=seq_len, batch_size=batch_size, clip=clip) for p in plans)


def frontier(found: Iterable[Estimate]) -> list[Estimate]:
    """Those that no other beats in both memory and time, the fastest first; of equals the one that was tried first."""
    best: list[Estimate] = []
    for one in sorted(found, key=lambda e: (round(e.seconds.total, 6), e.peak_bytes)):
        if not best or one.peak_bytes < best[-1].peak_bytes:
            best.append(one)
    return best


def words(plan: Plan) -> str:
    """What a plan says beyond the defaults, as in its call: `Plan(mlp_tiles=16, offload=('block_in',))`."""
    return _call(plan)


def _call(made: Plan | Policy) -> str:
    changed = []
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if value != field.default:
            shown = _call(value) if isinstance(value, Policy) else value.axes if isinstance(value, MeshShape) else value
            changed.append(f"{field.name}={shown if isinstance(value, Policy) else repr(shown)}")
    return f"{type(made).__name__}({', '.join(changed)})"
