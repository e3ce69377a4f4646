"""Whether an answer of notebook 12 holds gradients or states twice, or grows with the layers, by its traced program."""

from collections.abc import Iterable, Iterator
from typing import Any

from jaxmem.tracing.jaxprs import equations, inner_jaxprs, scan_parts

L, N, D, F = 5, 6, 8, 12  # layers, tokens and widths of the stack that the answers are tried on
_LOOPS = ("scan", "while")
_IN_PLACE = ("dynamic_update_slice", "scatter", "device_put", "optimization_barrier")  # or moved, never there twice


def refuse_waiting_gradients(program: Any) -> None:
    """Raise AssertionError where gradients of several layers wait for their update, by a traced program's order."""
    shapes = {getattr(var.aval, "shape", ()) for eqn, _ in equations(program) for var in eqn.outvars}
    at_once = any(len(shape) > 2 and shape[-2:] in ((D + 1, F), (F + 1, D)) for shape in shapes)
    if at_once or _gathered(program) or not _in_order(program) or _late(program):
        raise AssertionError(
            "the numbers are right, but gradients of several layers wait for their update: they exist at once, and "
            "that room was to be saved. Where must the update stand, and what of a gradient is needed after its turn?"
        )


def refuse_second_state(program: Any) -> None:
    """Raise AssertionError where anything but a loop's carry and updates in place is as large as all layers."""
    for eqn, _ in equations(program):
        shapes = {getattr(var.aval, "shape", ()) for var in eqn.outvars} & {(L, D, F), (L, F, D)}
        stacked = eqn.outvars[scan_parts(eqn)[1] :] if eqn.primitive.name == "scan" else []
        if any(getattr(var.aval, "shape", ()) in shapes for var in stacked):
            raise AssertionError(
                "the numbers are right, but the scan stacks up the new layers: a scan's outputs are a second stack "
                "beside the one it reads, and there is no room for two. In which part of a scan does one turn change "
                "what the next one is given?"
            )
        if shapes and eqn.primitive.name not in _IN_PLACE and not inner_jaxprs(eqn):
            raise AssertionError(
                f"the numbers are right, but `{eqn.primitive.name}` makes an array {[*shapes.pop()]}, as large as the "
                "weights of all layers, beside the state that was given. There is no room for two. What of a stack "
                "may a turn write, and can a loop begin at the far end of a stack that nobody turned round?"
            )


def refuse_growth(few: Any, many: Any) -> None:
    """Raise AssertionError where the traced program of many layers is larger than that of a few."""
    sizes = [sum(1 for _ in equations(program)) for program in (few, many)]
    if sizes[1] > 1.2 * sizes[0]:
        raise AssertionError(
            f"the numbers are right, but the program has {sizes[0]} operations for three layers and {sizes[1]} for "
            f"{L}: a loop of Python's writes each layer into it, for the compiler to work on one by one. Which loop of "
            "JAX's is compiled once for all of its turns?"
        )


def _gathered(program: Any) -> bool:
    """Whether a loop without an update makes what has the shape of all weights: their gradients."""
    for eqn, body in _loops(eqn for eqn, _ in equations(program)):
        updates = any(_letter(inner) == "U" for inner, _ in equations(body))
        made = [
            one
            for one, last in zip(eqn.outvars, body.outvars, strict=False)
            if not any(last is given for given in body.invars)
        ]
        if not updates and any(getattr(one.aval, "shape", ()) in ((L, D, F), (L, F, D)) for one in made):
            return True
    return False


def _in_order(program: Any, in_loop: bool = False) -> bool:
    """Whether between two updates a layer's gradient is computed: U for an update's mark, P for a product.

    In a loop's body that updates, a product has to stand too.
    """
    letters = "".join(_letter(eqn) for eqn in _without_loops(program))
    if "UU" in letters or (in_loop and set(letters) == {"U"}):
        return False
    return all(_in_order(body, in_loop=True) for _, body in _loops(_without_loops(program)))


def _late(program: Any) -> bool:
    """Whether a loop updates a layer by a gradient of an earlier turn: two layers' gradients are alive at once then."""
    loops = _loops(eqn for eqn, _ in equations(program))
    return any(_from_products(body, [False] * len(body.invars)) is None for _, body in loops)


def _from_products(body: Any, given: list[bool]) -> list[bool] | None:
    """Return which results a product of this body leads to; None where an update takes what no product led to.

    `given` says the same of what enters the body.
    """
    known = dict(zip(map(id, body.invars), given, strict=True))
    for eqn in body.eqns:
        entering = [known.get(id(var), False) for var in eqn.invars]
        if _letter(eqn) == "U" and not entering[0]:
            return None
        made = [any(entering) or any(_letter(one) == "P" for one in _all(eqn))] * len(eqn.outvars)
        for inner in inner_jaxprs(eqn) if eqn.primitive.name not in _LOOPS else ():
            last = [*[True] * len(inner.invars), *entering][len(entering) :]  # a cond's first operand stays outside
            found = _from_products(inner, last)
            if found is None:
                return None
            made = found if len(found) == len(made) else made
        known |= zip(map(id, eqn.outvars), made, strict=True)
    return [known.get(id(var), False) for var in body.outvars]


def _all(eqn: Any) -> list[Any]:
    return [eqn, *(one for inner in inner_jaxprs(eqn) for one, _ in equations(inner))]


def _loops(operations: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the loops among some operations, each with every program inside it."""
    yield from ((eqn, body) for eqn in operations if eqn.primitive.name in _LOOPS for body in inner_jaxprs(eqn))


def _without_loops(program: Any) -> Iterator[Any]:
    for eqn in program.eqns:
        yield eqn
        if eqn.primitive.name not in _LOOPS:
            for inner in inner_jaxprs(eqn):
                yield from _without_loops(inner)


def _letter(eqn: Any) -> str:
    if eqn.primitive.name == "dot_general":
        return "P"
    updates = eqn.primitive.name == "pad" and eqn.outvars[0].aval.shape[-2:] == (D + 1, F)
    return "U" if updates else ""
