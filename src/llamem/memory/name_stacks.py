"""The names that JAX gives to operations: what they tell of how one was derived. JAX does not promise them."""

from typing import Literal


def differentiation_pass(path: str) -> Literal["forward", "backward", "run again", ""]:
    """Return the pass that an operation belongs to, by its `op_name`: JAX writes there how it was derived.

    "" for an operation outside of anything differentiated, as an optimizer's are.
    """
    if "rematted_computation" in path:
        return "run again"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else ""
