"""What the arguments of a traced program are for, told by where they go: weights, moments, a batch; and its logits."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from jax.extend import core as jex_core

from jaxmem.reading.hlo import ENTRY, Instruction, Program
from jaxmem.tracing.arguments import Leaf
from jaxmem.tracing.jaxprs import Branches, control_flow, differentiation_pass

# What an array in memory is for.
Category = Literal[
    "weights",
    "optimizer",
    "batch",
    "gradients",
    "residuals",
    "logits",
    "rematerialised",
    "workspace",
    "output",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

# Names of arguments that say what these are: the first of them in an argument's path decides.
_NAMES: dict[Category, tuple[str, ...]] = {
    "weights": ("params", "weights", "model", "base"),
    "optimizer": ("opt_state", "optimizer", "opt", "moments"),
    "batch": ("batch", "tokens", "inputs", "images", "targets", "labels"),
}
# Operations that hand on what they are given, in another type, order, shape or place.
_MOVES = (
    "convert_element_type", "reduce_precision", "reshape", "squeeze", "transpose", "broadcast_in_dim", "rev", "copy",
    "copy_p", "slice", "dynamic_slice", "concatenate", "device_put", "sharding_constraint", "name", "pvary",
    "optimization_barrier", "all_gather", "reshard", "layout_constraint",
)  # fmt: skip
_MANY = 4  # arrays: an argument of so many, given to a model and not given back, is frozen weights and no batch
# A matrix product: of both operands, the right one first, the arguments that they are and how many rows they bring.
_Product = tuple[tuple[frozenset[int], int], tuple[frozenset[int], int]]


@dataclasses.dataclass(frozen=True)
class _Value:
    """The arguments that a value is, moved or cast; the products that it is, or is a function of element by element."""

    arguments: frozenset[int] = frozenset()
    products: frozenset[_Product] = frozenset()


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The category of each argument, and sizes of the arrays of logits: (elements, entries of the vocabulary)."""

    categories: tuple[Category, ...]
    logits: frozenset[tuple[int, int]] = frozenset()

    def is_logits(self, sizes: Sequence[int]) -> bool:
        """Return whether an array of these sizes is one of logits."""
        return any(math.prod(sizes) == elements and vocabulary in sizes for elements, vocabulary in self.logits)


def find_provenance(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Provenance:
    """Return what the arguments of a traced program are.

    Where the program differentiates: what its model uses, and what has its shape and type among the results, is
    weights; what only the update uses and comes back is the optimizer's; integers that the model uses are a batch.
    Names decide about the rest, and where nothing is differentiated. Logits are products with weights whose rows are
    searched for their largest.
    """
    walk = _Walk()
    walk.run(traced.jaxpr, [_Value(arguments=frozenset({i})) for i in range(len(leaves))], inside=False)
    results = {(out.shape, out.dtype) for out in traced.out_avals}
    counts = Counter(leaf.argument for leaf in leaves)
    categories: list[Category] = []
    for i, leaf in enumerate(leaves):
        returned = walk.differentiates and (leaf.shape.shape, leaf.shape.dtype) in results
        floating = leaf.shape.dtype.kind not in "iub"
        named = named_category(leaf.name)
        if returned and i not in walk.used:
            categories.append("optimizer")
        elif returned and floating and named not in ("optimizer", "batch"):
            categories.append("weights")
        elif named != "other" or leaf.key:
            categories.append(named)
        elif i in walk.used or not walk.differentiates:
            frozen = "weights" if counts[leaf.argument] >= _MANY else "batch" if i in walk.used else "other"
            categories.append(frozen if floating else "batch")
        else:
            categories.append("other")
    weights = frozenset(i for i, category in enumerate(categories) if category == "weights")
    candidates = set()
    for product, elements in walk.searched.items():
        rows = [rows for arguments, rows in product if arguments and arguments <= weights]
        candidates |= {(elements, vocabulary) for vocabulary in rows[:1]}
    # A router of experts looks the same, and is small.
    largest = max((elements for elements, _ in candidates), default=0)
    return Provenance(tuple(categories), frozenset(pair for pair in candidates if pair[0] > largest // 16))


def named_category(name: str) -> Category:
    """Return what an argument is, by the first telling name in a path such as `state.params['norm']`, or "other"."""
    parts = re.findall(r"\w+", name)
    return next((category for part in parts for category, names in _NAMES.items() if part in names), "other")


class _Walk:
    """Follows the arguments through a program, and through those inside it."""

    def __init__(self) -> None:
        self.used: set[int] = set()  # by an operation that JAX derived from a differentiated function
        self.differentiates = False
        self.searched: dict[_Product, int] = {}  # products whose rows are searched for their largest, with their sizes

    def run(self, jaxpr: jex_core.Jaxpr, values: Sequence[_Value], *, inside: bool) -> list[_Value]:
        """Run a program whose arguments are `values`; `inside` something that is differentiated. Return its results."""
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, values, strict=True))

        def value(atom: Any) -> _Value:
            return _Value() if isinstance(atom, jex_core.Literal) else known.get(atom, _Value())

        for eqn in jaxpr.eqns:
            operands = [value(atom) for atom in eqn.invars]
            derived = inside or bool(differentiation_pass(str(eqn.source_info.name_stack)))
            if derived:
                self.differentiates = True
                self.used.update(*(operand.arguments for operand in operands))
            known.update(zip(eqn.outvars, self._results(eqn, operands, derived), strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: jex_core.JaxprEqn, operands: list[_Value], derived: bool) -> list[_Value]:
        name = eqn.primitive.name
        if (flow := control_flow(eqn)) is not None:
            # The last operands are those of the body, or of every branch; what a loop's condition reads is no matter.
            bodies = [body.jaxpr for body in (flow.branches if isinstance(flow, Branches) else (flow.body,))]
            ways = [self.run(body, operands[len(operands) - len(body.invars) :], inside=derived) for body in bodies]
            return [_either(values) for values in zip(*ways, strict=True)]
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        if name == "dot_general":
            return [_Value(products=frozenset({_product(eqn, operands, avals)}))]
        if name in ("reduce_max", "argmax"):
            size = math.prod(avals[0].shape)
            self.searched |= {product: max(size, self.searched.get(product, 0)) for product in operands[0].products}
        if name in _MOVES:
            return [operands[0]] * len(eqn.outvars)
        alike = [operand for operand, aval in zip(operands, avals, strict=False) if aval.shape == avals[-1].shape]
        return [_Value(products=_either(alike).products)] * len(eqn.outvars)


def _either(values: Iterable[_Value]) -> _Value:
    values = tuple(values)
    return _Value(
        frozenset().union(*(value.arguments for value in values)),
        frozenset().union(*(value.products for value in values)),
    )


def _product(eqn: jex_core.JaxprEqn, operands: list[_Value], avals: list[Any]) -> _Product:
    contracted, batch = eqn.params["dimension_numbers"]

    def operand(side: int) -> tuple[frozenset[int], int]:
        shared = (*contracted[side], *batch[side])
        rows = math.prod(size for axis, size in enumerate(avals[side].shape) if axis not in shared)
        return operands[side].arguments, rows

    return operand(1), operand(0)


# Instructions of which an argument in another place, order or type is made, and nothing else.
_HLO_COPIES = ("parameter", "copy", "copy-start", "copy-done", "bitcast", "reshape", "transpose", "convert")
# Those whose first operand is what they write: in another place, order or type, or with a few changes.
_HLO_MOVES = (*_HLO_COPIES[1:], "get-tuple-element", "scatter")
_MOST_HOPS = 12


class Origins:
    """The instructions of an optimised program, to walk back from what writes a buffer to what computes its contents.

    A scan puts a layer's residual into its stack with a `dynamic-update-slice`, and compilers copy, reshape and fuse:
    the interesting operation is the one before.
    """

    def __init__(self, program: Program):
        self._computations = program.computations
        self._by_name = {line.name: line for lines in program.computations.values() for line in lines}

    def named(self, name: str) -> Instruction:
        """Return the instruction of this name; an empty one where the program's text has none."""
        return self._by_name.get(name) or Instruction(name, (), "", (), "")

    def argument_of(self, line: Instruction) -> int | None:
        """Return the number of the program's argument of which the line is a copy, or which it casts; else None."""
        for _ in range(_MOST_HOPS):
            if line.opcode == "parameter":
                return int(line.operands[0]) if line in self._computations[ENTRY] else None
            inside = self._computations.get(line.named("calls"), ()) if line.opcode == "fusion" else (line,)
            if not inside or len(line.operands) != 1 or not {inner.opcode for inner in inside} <= {*_HLO_COPIES}:
                return None
            line = self.named(line.operands[0])
        return None

    def of(self, value: str) -> Instruction:
        """Return what computes a value such as "fusion.3{1}"; its own instruction where nothing tells more."""
        name, _, index = value.rstrip("}").partition("{")
        passed: dict[str, str] = {}  # what the fusion that the walk is in is given for each of its parameters
        line = own = self.named(name)
        for _ in range(_MOST_HOPS):
            if line.opcode == "parameter" and line.name in passed:
                following = passed[line.name]
            elif inside := self._moved_inside(line):
                root = inside[-1]
                parameters = [inner for inner in inside if inner.opcode == "parameter"]
                passed = {inner.name: line.operands[int(inner.operands[0])] for inner in parameters}
                number = int(index) if index.isdigit() else 0
                following = root.operands[number] if root.opcode == "tuple" else root.name
            elif line.opcode == "dynamic-update-slice":
                following = line.operands[1]
            elif line.opcode in _HLO_MOVES and line.operands[0] in self._by_name:
                following = line.operands[0]
            else:
                break
            line, index = self.named(following), ""
        return line if line.path else own

    def _moved_inside(self, line: Instruction) -> Sequence[Instruction]:
        """Return the instructions inside a fusion that only moves, or does not say itself what it computes."""
        moves = "dynamic_update_slice" in line.rest or "dynamic-update-slice" in line.name
        is_told = line.path and not moves
        return () if line.opcode != "fusion" or is_told else self._computations.get(line.named("calls"), ())
