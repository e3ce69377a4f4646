"""Whether a traced program draws fresh random numbers in every step and every layer."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from jax.extend import core as jex_core

from llamem.memory.jaxprs import inner_jaxprs, scan_parts

_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator")
_CONSTANT = (
    "a random number of the program depends on no input: its key was made (or a counter drawn from) while tracing, so "
    "every step draws the same. Pass the key as an argument."
)
_SHARED = (
    "all iterations of a loop draw with one key, closed over: all layers drop the same units. Split the key, and pass "
    "one to every layer with its weights."
)
_TWICE = (
    "several draws of one shape use one key: layers drop the same units. Split the key, or jax.random.fold_in(key, i)."
)


def key_faults(jaxpr: jex_core.ClosedJaxpr) -> list[str]:
    """What is wrong with the keys of a traced function, in words. Its arguments are what changes from step to step."""
    walker = _Walker()
    inputs = [(("input", i), True, False) for i in range(len(jaxpr.jaxpr.invars))]
    walker.walk(jaxpr.jaxpr, inputs, loop_depth=0)
    if any(times > 1 for times in walker.draws.values()):
        walker.found.append(_TWICE)
    return list(dict.fromkeys(walker.found))


class _Walker:
    """Follows values through a program.

    Of each it knows a token (equal for equal values), whether it depends on an input of the program, and whether it
    differs between the iterations of the innermost loop around it.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.draws: Counter[Hashable] = Counter()

    def walk(self, jaxpr: jex_core.Jaxpr, inputs: list[tuple[Any, bool, bool]], loop_depth: int) -> list[Any]:
        known: dict[Any, tuple[Any, bool, bool]] = {var: (("const", id(var)), False, False) for var in jaxpr.constvars}
        known |= dict(zip(jaxpr.invars, inputs, strict=True))

        def look(var: Any) -> tuple[Any, bool, bool]:
            if isinstance(var, jex_core.Literal):
                return ("literal", str(var.val)), False, False
            return known[var]

        for eqn in jaxpr.eqns:
            operands = [look(var) for var in eqn.invars]
            outs = self._apply(eqn, operands, loop_depth)
            known |= dict(zip(eqn.outvars, outs, strict=True))
        return [look(var) for var in jaxpr.outvars]

    def _apply(self, eqn: Any, operands: list[tuple[Any, bool, bool]], loop_depth: int) -> list[Any]:
        depends, varies = (any(operand[k] for operand in operands) for k in (1, 2))
        inner = inner_jaxprs(eqn)
        if eqn.primitive.name == "scan":
            (body,) = inner
            n_consts, n_carry = scan_parts(eqn)
            inputs = [(token, on_input, False) for token, on_input, _ in operands[:n_consts]]
            # A carry that depends on no input at first may do so later; either way it changes.
            inputs += [((token, "carried"), True, True) for token, _, _ in operands[n_consts : n_consts + n_carry]]
            inputs += [((token, "of each"), True, True) for token, _, _ in operands[n_consts + n_carry :]]
            self.walk(body, inputs, loop_depth + 1)
        elif len(inner) == 1 and len(inner[0].invars) == len(operands):
            return self.walk(inner[0], operands, loop_depth)
        elif inner:  # branches and while loops: what they draw is taken to be fresh
            return [((id(eqn), i), True, True) for i in range(len(eqn.outvars))]
        elif eqn.primitive.name in _DRAWS:
            self._draw(eqn, operands, depends, varies, loop_depth)
        token = (eqn.primitive.name, tuple(operand[0] for operand in operands), str(eqn.params) if not inner else "")
        return [((hash(token), i), depends, varies) for i in range(len(eqn.outvars))]

    def _draw(self, eqn: Any, operands: list[Any], depends: bool, varies: bool, loop_depth: int) -> None:
        if eqn.outvars[0].aval.size == 1:
            return
        if not depends:
            self.found.append(_CONSTANT)
        elif loop_depth and not varies:
            self.found.append(_SHARED)
        else:
            self.draws[(tuple(operand[0] for operand in operands), eqn.outvars[0].aval.shape)] += 1
