"""Which plans are worth a thought, and which of them no other beats: plain enumeration, every one estimated."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from llamem.layers import Policy
from llamem.llama import LlamaConfig, MeshShape, Plan
from llamem.memory import Target
from llamem.planner.estimates import Estimate, estimate

# Of each tool the settings that are tried, the plainest first: of two equal plans the plainer one is taken.
MODES = ("scan", "nested")
REMATS: tuple[str | Policy | None, ...] = ("nothing", "attn", Policy(save=("attn_out",)), "qkv_attn", "minimal", None)
ATTENTION_TILES = (1, 2, 4, 8)
MLP_TILES = (1, 4, 16, 64)
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("block_in",), ("block_in", "attn_out"))
MOMENTS = ("device", "host")
# About how many logits a tile holds, in rows of tokens or columns of the vocabulary; None: as `choose_tiles` says.
LOSS_TILES: tuple[tuple[str, int] | None, ...] = (None, ("tokens", 512), ("vocab", 2048), ("vocab", 512))


def meshes(config: LlamaConfig, chip: Target, seq_len: int, batch_size: int) -> Iterator[MeshShape]:
    """Ways to lay a model and its batch on a target's chips: FSDP first, then with tensor or context parallelism."""
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


def plans(
    config: LlamaConfig, chip: Target, seq_len: int, batch_size: int, mesh: MeshShape | Mapping[str, int] | None
) -> Iterator[Plan]:
    """The plans that are tried, without those that exclude themselves."""
    tokens = seq_len * batch_size
    for lies in [MeshShape.of(mesh)] if mesh is not None else meshes(config, chip, seq_len, batch_size):
        attention_tiles = [n for n in ATTENTION_TILES if (config.n_kv_heads // lies.tensor) % n == 0]
        choices = product(MODES, REMATS, attention_tiles, MLP_TILES, OFFLOADS, MOMENTS, LOSS_TILES)
        for mode, remat, heads, rows, offload, moments, loss in choices:
            if ((remat is None or lies.devices > 1) and moments == "host") or (
                remat is None and (mode, rows) != ("scan", 1)
            ):
                continue
            if loss is not None and lies.tensor > 1 and loss[0] == "tokens":
                continue
            try:
                yield Plan(
                    mode=mode,
                    remat=remat,
                    attention_tiles=heads,
                    mlp_tiles=rows,
                    offload=offload,
                    moments=moments,
                    mesh=lies,
                    **_loss(loss, config, tokens // (lies.fsdp * lies.context), lies),
                )
            except ValueError:  # tools that exclude each other
                continue


def _loss(choice: tuple[str, int] | None, config: LlamaConfig, tokens: int, mesh: MeshShape) -> dict[str, Any]:
    if choice is None:
        return {}
    axis, size = choice
    extent = tokens if axis == "tokens" else config.vocab_size // mesh.tensor
    return {"loss_tiles": max(1, -(-extent // size))} | ({} if mesh.tensor > 1 else {"loss_axis": axis})


def estimates(
    config: LlamaConfig,
    chip: Target,
    seq_len: int,
    batch_size: int,
    mesh: MeshShape | Mapping[str, int] | None = None,
) -> list[Estimate]:
    """An estimate of every plan that is tried, in the order in which they are."""
    tried = plans(config, chip, seq_len, batch_size, mesh)
    return [estimate(config, plan, chip.name, seq_len=seq_len, batch_size=batch_size) for plan in tried]


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
