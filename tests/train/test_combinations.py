"""Powers together: one table of what is trained, over which weights, and where; each row's step is the plain one.

The numbers that a step leaves are those of one device, of plain weights and of no tool: after one step the first
moments are a tenth of the clipped gradients, those of every leaf that is trained. One power alone is compared with
float64 beside it: `llama/test_model.py`, `adapters/test_lora.py`, `mesh/mesh_cases.py`, `test_streamed_step.py`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from children import answer_of

from llamem.quantized.blocks import BlockKind
from llamem.train.settings import Clip

EVERY = {"fsdp": 2, "tensor": 2, "context": 2}
GROUPS: dict[str, Any] = {"head_groups": 2, "mlp_tiles": 3}
ON_HOST: dict[str, Any] = {"weights": "host", "offload": ("block_in",)}


class Row(NamedTuple):
    """One combination: what is trained, over what, and how the step is computed and accumulated."""

    trained: str  # "weights" or "adapters"
    blocks: BlockKind | None  # what kind of blocks the frozen matrices are in
    tied: bool
    plan: dict[str, Any]
    accumulate: int = 1
    clip: Clip = "global"


ROWS = {
    # What is trained, the kind of blocks, whether the head is tied, the plan, in how many parts.
    "weights, moments on the host": Row("weights", None, True, {"moments": "host", **GROUPS}, 2),
    "weights, streamed": Row("weights", None, False, {"moments": "host", **ON_HOST, **GROUPS}, clip="layer"),
    "weights, a mesh, groups": Row("weights", None, True, {"mesh": {"fsdp": 2, "context": 2}, **GROUPS}, 2),
    "adapters, every mesh axis, tiles": Row("adapters", None, False, {"mesh": EVERY, "mlp_tiles": 3}),
    "adapters, shared batch": Row("adapters", None, True, {"mesh": {"data": 4}}, 2),
    "adapters, host": Row("adapters", None, True, {**ON_HOST, **GROUPS}),
    "adapters, blocks, groups": Row("adapters", "q4_1", True, {"mode": "nested", **GROUPS}),
    "adapters, blocks, nothing again": Row("adapters", "q4_0", False, {"remat": None, "loss_tiles": None}),
    "adapters, blocks, host": Row("adapters", "q8_0", False, {**ON_HOST, **GROUPS}, 2),
    "adapters, blocks, shared batch": Row("adapters", "q4_0", True, {"mesh": {"data": 4}, "mlp_tiles": 3}),
}


@pytest.fixture(scope="module")
def seen():
    return answer_of(Path(__file__).parent / "combinations.py")


@pytest.mark.parametrize("name", ROWS)
def test_a_step_leaves_what_the_plain_step_leaves(seen, name):
    errors = seen[name]["errors"]
    assert len(errors) >= (22 if ROWS[name].trained == "weights" else 36), sorted(errors)
    wrong = {leaf: error for leaf, error in errors.items() if not error < 2e-5}
    assert not wrong, wrong
    assert seen[name]["without a gradient"] == [], "every leaf takes part"
