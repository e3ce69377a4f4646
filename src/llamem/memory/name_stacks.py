"""What JAX writes into the paths of a compiled program's operations, and does not promise to keep as it is."""

from typing import Literal


def differentiation_pass(path: str) -> Literal["forward", "backward", "run again", ""]:
    """Which pass an operation belongs to, by its `op_name`: JAX writes there how it was derived.

    "" for an operation outside of anything differentiated, as an optimizer's are.
    """
    if "rematted_computation" in path:
        return "run again"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else ""
