"""What the arguments of a traced program are for, told by where they go: weights, moments, a batch; and its logits."""

import dataclasses
import functools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from jax.extend import core as jex_core

from jaxmem.reading.hlo import ENTRY, Instruction, Program
from jaxmem.tracing.arguments import Leaf
from jaxmem.tracing.jaxprs import PRODUCTS, Branches, control_flow, differentiation_pass

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
# A matrix product: of both operands, the right one first, the arguments that they are and how many rows they bring.
_Product = tuple[tuple[frozenset[int], int], tuple[frozenset[int], int]]


@dataclasses.dataclass(frozen=True)
class _Value:
    """The arguments that a value is, moved or cast; the products that it is, or is a function of element by element.

    `made_of`: all arguments that it depends on, as bits of a number; `backward`: gradients are among what it is of.
    """

    arguments: frozenset[int] = frozenset()
    products: frozenset[_Product] = frozenset()
    made_of: int = 0
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The category of each argument, and sizes of the arrays of logits: (elements, entries of the vocabulary).

    `replaced`: the arguments that a training step returns new values of: weights, moments, a carried state.
    """

    categories: tuple[Category, ...]
    logits: frozenset[tuple[int, int]] = frozenset()
    replaced: frozenset[int] = frozenset()

    def is_logits(self, sizes: Sequence[int]) -> bool:
        """Return whether an array of these sizes is one of logits."""
        return any(math.prod(sizes) == elements and vocabulary in sizes for elements, vocabulary in self.logits)


def find_provenance(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Provenance:
    """Return what the arguments of a traced program are.

    Where the program differentiates: what its model uses, and what comes back changed by a gradient, is weights; what
    only the update uses and comes back is the optimizer's; what comes back without a gradient is a carried state,
    "other". Names decide about the rest. Without a name, what data are multiplied with, or what integers look up, is
    weights that are not trained, with all of its argument; anything else is a batch. Logits are products with weights
    whose rows are searched for their largest.
    """
    walk = _Walk()
    given = [_Value(arguments=frozenset({i}), made_of=1 << i) for i in range(len(leaves))]
    results = list(zip(traced.out_avals, walk.run(traced.jaxpr, given, inside=False, backward=False), strict=True))
    alike: list[list[_Value]] = [
        [value for out, value in results if (out.shape, out.dtype) == (leaf.shape.shape, leaf.shape.dtype)]
        for leaf in leaves
    ]
    floating = [leaf.shape.dtype.kind not in "iub" for leaf in leaves]
    named = [named_category(leaf.name) for leaf in leaves]
    updated = [any(value.backward for value in values) or not walk.backward for values in alike]
    changed = [
        any(value.made_of >> i & 1 for value in values)
        and not any(value.arguments == {i} and value.made_of == 1 << i for value in values)
        for i, values in enumerate(alike)
    ]
    categories: list[Category | None] = []
    for i, leaf in enumerate(leaves):
        returned = walk.differentiates and bool(alike[i])
        if returned and i not in walk.used:
            categories.append("optimizer")
        elif returned and floating[i] and updated[i] and named[i] not in ("optimizer", "batch"):
            categories.append("weights")
        elif named[i] != "other" or leaf.key:
            categories.append(named[i])
        else:
            categories.append("other" if floating[i] and changed[i] and not updated[i] else None)
    frozen = _frozen_weights(walk, leaves, categories)
    for i, category in enumerate(categories):
        if category is None:
            is_data = walk.reached >> i & 1 or not (floating[i] or walk.differentiates)
            kind: Category = "batch" if is_data else "other"
            categories[i] = "weights" if i in frozen else kind
    found: tuple[Category, ...] = tuple(category or "other" for category in categories)
    weights = frozenset(i for i, category in enumerate(found) if category == "weights")
    given_back = {"weights": walk.stepped, "optimizer": set(range(len(leaves))), "other": set(range(len(leaves)))}
    replaced = frozenset(
        i for i, own in enumerate(found) if walk.differentiates and changed[i] and i in given_back.get(own, ())
    )
    candidates = set()
    for product, elements in walk.searched.items():
        rows = [rows for arguments, rows in product if arguments and arguments <= weights]
        candidates |= {(elements, vocabulary) for vocabulary in rows[:1]}
    # A router of experts looks the same, and is small.
    largest = max((elements for elements, _ in candidates), default=0)
    return Provenance(found, frozenset(pair for pair in candidates if pair[0] > largest // 16), replaced)


def _frozen_weights(walk: "_Walk", leaves: Sequence[Leaf], categories: Sequence[Category | None]) -> set[int]:
    """Return which of the arguments without a category are weights that are not trained."""
    trained = sum(1 << i for i, category in enumerate(categories) if category == "weights")
    small = [leaf.shape.dtype.kind not in "iub" or leaf.shape.dtype.itemsize == 1 for leaf in leaves]
    integers = sum(1 << i for i, is_small in enumerate(small) if not is_small)
    whole: dict[int, list[int]] = defaultdict(list)
    for i, leaf in enumerate(leaves):
        whole[leaf.argument].append(i)
    groups: dict[Any, int] = defaultdict(int)  # arguments, or parts of one in which weights, moments and data lie
    for i, leaf in enumerate(leaves):
        if categories[i] is None and small[i]:
            mixed = any(categories[j] is not None or not small[j] for j in whole[leaf.argument])
            part = re.match(r"\w*[^\w]*\w*", leaf.name) if mixed else None
            groups[leaf.argument, part and part[0]] |= 1 << i

    def is_part(made_of: int, group: int) -> bool:
        return bool(made_of & group) and not made_of & ~group

    found = [group for group in groups.values() if any(is_part(table, group) for table in walk.looked_up)]
    for group in groups.values():
        sides = [(a, b) for pair in walk.multiplied for a, b in (pair, pair[::-1]) if is_part(a, group)]
        if group not in found and any(other & integers for _, other in sides):
            found.append(group)
    # Where all data are numbers, what stands on the right is weights, as in x @ w, or in a convolution.
    for group in groups.values():
        for left, right in walk.multiplied:
            known = trained | sum(found)
            is_right = is_part(right & ~trained, group) and not (left & trained and right & trained)
            if group not in found and is_right and left & ~known & ~group:
                found.append(group)
    return {i for i in range(len(leaves)) if any(group >> i & 1 for group in found)}


def named_category(name: str) -> Category:
    """Return what an argument is, by the first telling name in a path such as `state.params['norm']`, or "other"."""
    parts = re.findall(r"\w+", name)
    return next((category for part in parts for category, names in _NAMES.items() if part in names), "other")


class _Walk:
    """Follows the arguments through a program, and through those inside it."""

    def __init__(self) -> None:
        self.used: set[int] = set()  # by an operation that JAX derived from a differentiated function
        self.stepped: set[int] = set()  # those that meet a gradient outside of what is differentiated
        self.reached = 0  # the arguments that such an operation depends on
        self.differentiates = self.backward = False
        self.searched: dict[_Product, int] = {}  # products whose rows are searched for their largest, with their sizes
        self.multiplied: set[tuple[int, int]] = set()  # what both sides of a product that is no gradient are made of
        self.looked_up: set[int] = set()  # what tables are made of, of which integers choose rows

    def run(self, jaxpr: jex_core.Jaxpr, values: Sequence[_Value], *, inside: bool, backward: bool) -> list[_Value]:
        """Run a program whose arguments are `values`. Return its results.

        It is `inside` something that is differentiated, and perhaps of its `backward` pass.
        """
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, values, strict=True))

        def value(atom: Any) -> _Value:
            return _Value() if isinstance(atom, jex_core.Literal) else known.get(atom, _Value())

        for eqn in jaxpr.eqns:
            operands = [value(atom) for atom in eqn.invars]
            own = differentiation_pass(str(eqn.source_info.name_stack))
            derived = inside or bool(own)
            if derived:
                self.differentiates = True
                self.used.update(*(operand.arguments for operand in operands))
                self.reached |= _either(operands).made_of
            elif eqn.primitive.name not in _MOVES and any(operand.backward for operand in operands):
                self.stepped.update(*(operand.arguments for operand in operands))
            going_back = backward or own == "backward"
            self.backward |= going_back
            known.update(zip(eqn.outvars, self._results(eqn, operands, derived, going_back), strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: jex_core.JaxprEqn, operands: list[_Value], derived: bool, backward: bool) -> list[_Value]:
        name = eqn.primitive.name
        if (flow := control_flow(eqn)) is not None:
            # The last operands are those of the body, or of every branch; what a loop's condition reads is no matter.
            bodies = [body.jaxpr for body in (flow.branches if isinstance(flow, Branches) else (flow.body,))]
            ways = [
                self.run(body, operands[len(operands) - len(body.invars) :], inside=derived, backward=backward)
                for body in bodies
            ]
            return [_either(values) for values in zip(*ways, strict=True)]
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        whole = _either(operands)
        made = _Value(made_of=whole.made_of, backward=whole.backward or backward)
        if name in PRODUCTS and not made.backward:
            self.multiplied.add((operands[0].made_of, operands[1].made_of))
        if name == "gather" and eqn.params["dimension_numbers"].offset_dims and operands[1].made_of:
            self.looked_up.add(operands[0].made_of)
        if name == "dot_general":
            return [dataclasses.replace(made, products=frozenset({_product(eqn, operands, avals)}))]
        if name in ("reduce_max", "argmax"):
            size = math.prod(avals[0].shape)
            self.searched |= {product: max(size, self.searched.get(product, 0)) for product in operands[0].products}
        if name in _MOVES:
            return [operands[0]] * len(eqn.outvars)
        alike = [operand for operand, aval in zip(operands, avals, strict=False) if aval.shape == avals[-1].shape]
        return [dataclasses.replace(made, products=_either(alike).products)] * len(eqn.outvars)


def _either(values: Iterable[_Value]) -> _Value:
    values = tuple(values)
    return _Value(
        frozenset().union(*(value.arguments for value in values)),
        frozenset().union(*(value.products for value in values)),
        functools.reduce(operator.or_, (value.made_of for value in values), 0),
        any(value.backward for value in values),
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
