"""Which plans are worth a thought: plain enumeration, every one estimated."""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

from llamem.layers.remat import Policy
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import MeshShape, Plan
from llamem.planner.estimates import Estimate, estimate_plan
from llamem.planner.sizes import Question

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
    found, why = [], None
    for mesh in _meshes(question):
        for plan in _plans(question.config, mesh, question.lora is None, streamed):
            try:
                found.append(estimate_plan(question, plan))
            except ValueError as error:  # a mesh that does not divide the sizes
                why = error
    if why is not None and not found:
        raise why
    return tuple(found)


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
def _plans(config: LlamaConfig, mesh: MeshShape, trained: bool, streamed: bool) -> tuple[Plan, ...]:
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
        fields: dict[str, Any] = {"mesh": mesh} | {name: value for one in choice for name, value in one.items()}
        if fields.get("remat", "") is None and (fields["head_groups"], fields["mlp_tiles"]) != (1, 1):
            continue
        try:
            plans.append(Plan(**fields))
        except ValueError:
            continue
    return tuple(plans)
