"""Which plans are worth a thought, and which of them no other beats: plain enumeration, every one estimated."""

import functools
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Literal

from llamem.layers import Policy
from llamem.llama import LlamaConfig, MeshShape, Plan
from llamem.planner.estimates import Estimate, estimate_plan
from llamem.planner.question import Question

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
HEAD_GROUPS = (1, 2, 4, 8)
MLP_TILES = (1, 4, 16, 64)
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("block_in",), ("block_in", "attn_out"))
MOMENTS: tuple[Literal["device", "host"], ...] = ("device", "host")
# About how many columns of the vocabulary a tile holds, or the plain loss; None: as `choose_tiles` says.
LOSS_TILES: tuple[tuple[str, int] | None, ...] = (None, ("vocab", 512), ("plain", 0))
# Where no plan fits with weights on the chip: layers updated one by one, then moments, then weights on the host.
STREAMED: tuple[dict[str, Any], ...] = (
    {"update": "in_backward"},
    {"update": "in_backward", "moments": "host"},
    {"update": "in_backward", "moments": "host", "weights": "host"},
)
# The same of adapters: moments are too small to move, and where the head is frozen tiles of tokens are the fastest.
ADAPTER_LOSS_TILES: tuple[tuple[str, int] | None, ...] = (None, ("plain", 0))
ADAPTER_STREAMED: tuple[dict[str, Any], ...] = ({"weights": "host"},)


@functools.lru_cache(maxsize=8)
def estimates(question: Question) -> tuple[Estimate, ...]:
    """Return an estimate of every plan that is tried, in the order in which they are. The last few answers are kept.

    Raises ValueError where the sizes divide among the chips in no way.
    """
    trained = question.lora is None
    return _estimated(question, [plan for mesh in _meshes(question) for plan in _plans(question.config, mesh, trained)])


@functools.lru_cache(maxsize=8)
def streamed_estimates(question: Question) -> tuple[Estimate, ...]:
    """Return estimates of plans that update layers in the backward pass, or fetch them from the host, or both.

    None for several chips, which share the weights out instead, and for a host that nobody told of.
    """
    if question.chip.devices > 1 or question.host_bytes is None:
        return ()
    return _estimated(question, _streamed_plans(question.config, question.lora is None))


def _meshes(question: Question) -> Iterator[MeshShape]:
    """Yield ways to lay a model on chips: FSDP first, then with tensor or context parallelism."""
    d_model, devices = question.config.d_model, question.chip.devices
    if question.mesh is not None:
        yield question.mesh
    elif question.quantize:  # blocks are not split
        yield MeshShape(data=devices)
    else:
        for other in (size for size in range(1, devices + 1) if devices % size == 0):
            for axis in ("tensor", "context") if other > 1 else ("tensor",):
                mesh = MeshShape(fsdp=devices // other, **{axis: other})
                if d_model % (mesh.fsdp * mesh.context) == 0:
                    yield mesh


@functools.lru_cache(maxsize=32)
def _plans(config: LlamaConfig, mesh: MeshShape, trained: bool) -> tuple[Plan, ...]:
    moments, loss_tiles = (MOMENTS, LOSS_TILES) if trained else (("device",), ADAPTER_LOSS_TILES)
    choices = product(KEPT, _head_groups(config, mesh), MLP_TILES, OFFLOADS, moments, loss_tiles)
    return _made(
        {
            "mode": mode,
            "remat": remat,
            "mesh": mesh,
            "head_groups": heads,
            "mlp_tiles": rows,
            "offload": offload,
            "moments": moments,
            **_loss(loss, config, mesh),
        }
        for (mode, remat), heads, rows, offload, moments, loss in choices
        if remat is not None or (heads, rows) == (1, 1)
    )


@functools.lru_cache(maxsize=8)
def _streamed_plans(config: LlamaConfig, trained: bool) -> tuple[Plan, ...]:
    ways, loss_tiles = (STREAMED, LOSS_TILES) if trained else (ADAPTER_STREAMED, ADAPTER_LOSS_TILES)
    choices = product(ways, _head_groups(config, MeshShape()), MLP_TILES, ((), ("block_in",)), loss_tiles)
    return _made(
        {"head_groups": heads, "mlp_tiles": rows, "offload": offload, **way, **_loss(loss, config, MeshShape())}
        for way, heads, rows, offload, loss in choices
    )


def _made(tried: Iterable[dict[str, Any]]) -> tuple[Plan, ...]:
    """Return the plans with these fields, without those whose tools exclude each other."""
    plans = []
    for fields in tried:
        try:
            plans.append(Plan(**fields))
        except ValueError:
            continue
    return tuple(plans)


def _estimated(question: Question, plans: Iterable[Plan]) -> tuple[Estimate, ...]:
    found, why = [], None
    for plan in plans:
        try:
            found.append(estimate_plan(question, plan))
        except ValueError as error:  # a mesh that does not divide the sizes
            why = error
    if why is not None and not found:
        raise why
    return tuple(found)


def _head_groups(config: LlamaConfig, mesh: MeshShape) -> list[int]:
    return [n for n in HEAD_GROUPS if (config.n_kv_heads // mesh.tensor) % n == 0]


def _loss(choice: tuple[str, int] | None, config: LlamaConfig, mesh: MeshShape) -> dict[str, Any]:
    if choice is None:
        return {}
    axis, size = choice
    if axis == "plain":
        return {} if mesh.tensor > 1 else {"loss_tiles": None}
    count = max(1, -(-config.vocab_size // mesh.tensor // size))
    return {"loss_tiles": count} | ({} if mesh.tensor > 1 else {"loss_axis": axis})


def frontier(found: Iterable[Estimate]) -> list[Estimate]:
    """Return those that no other beats in both memory and time, the fastest first; of equals the one tried first."""
    best: list[Estimate] = []
    for one in sorted(found, key=lambda e: (round(e.seconds.total, 6), e.peak_bytes)):
        if not best or one.peak_bytes < best[-1].peak_bytes:
            best.append(one)
    return best
