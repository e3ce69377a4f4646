"""What the arguments of a traced program are for, told by where they go: weights, moments, a batch; and its logits."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex_core

from llamem.memory.arguments import Leaf
from llamem.memory.control_flow import Branches, While
from llamem.memory.jaxprs import control_flow
from llamem.memory.name_stacks import differentiation_pass
from llamem.memory.timeline_categories import Category, named_category

# Operations that hand on what they are given, in another type, order, shape or place.
_MOVES = (
    "convert_element_type", "reduce_precision", "reshape", "squeeze", "transpose", "broadcast_in_dim", "rev", "copy",
    "copy_p", "slice", "dynamic_slice", "concatenate", "device_put", "sharding_constraint", "name", "pvary",
    "optimization_barrier", "all_gather", "reshard", "layout_constraint",
)  # fmt: skip
_MANY = 4  # arrays: an argument of so many, given to a model and not given back, is frozen weights and no batch


@dataclasses.dataclass(frozen=True)
class _Product:
    """A matrix product: of which arguments both operands are, and how many rows each brings."""

    left: frozenset[int]
    right: frozenset[int]
    left_rows: int
    right_rows: int


@dataclasses.dataclass(frozen=True)
class _Value:
    """The arguments that a value is, moved or cast; the products that it is, or is a function of element by element."""

    arguments: frozenset[int] = frozenset()
    products: frozenset[_Product] = frozenset()


_UNKNOWN = _Value()


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
    given = [_Value(arguments=frozenset({i})) for i in range(len(leaves))]
    walk.run(traced.jaxpr, given, inside=False)
    results = {(out.shape, out.dtype) for out in traced.out_avals}
    counts = {leaf.argument: sum(one.argument == leaf.argument for one in leaves) for leaf in leaves}
    categories: list[Category] = []
    for i, leaf in enumerate(leaves):
        returned = (leaf.shape.shape, leaf.shape.dtype) in results
        floating = leaf.shape.dtype.kind not in "iub"
        named = named_category(leaf.name)
        if walk.differentiates and returned and i not in walk.used:
            categories.append("optimizer")
        elif walk.differentiates and returned and floating and named not in ("optimizer", "batch"):
            categories.append("weights")
        elif named != "other" or leaf.key:
            categories.append(named)
        elif i in walk.used or not walk.differentiates:
            frozen = "weights" if counts[leaf.argument] >= _MANY else "batch" if i in walk.used else "other"
            categories.append(frozen if floating else "batch")
        else:
            categories.append("other")
    weights = frozenset(i for i, category in enumerate(categories) if category == "weights")
    return Provenance(tuple(categories), _logits(walk.searched, weights))


def _logits(products: Mapping[_Product, int], weights: frozenset[int]) -> frozenset[tuple[int, int]]:
    found = set()
    for product, elements in products.items():
        if product.right and product.right <= weights:
            found.add((elements, product.right_rows))
        elif product.left and product.left <= weights:
            found.add((elements, product.left_rows))
    # A router of experts looks the same, and is small.
    largest = max((elements for elements, _ in found), default=0)
    return frozenset((elements, vocabulary) for elements, vocabulary in found if elements > largest // 16)


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
            return _UNKNOWN if isinstance(atom, jex_core.Literal) else known.get(atom, _UNKNOWN)

        for eqn in jaxpr.eqns:
            operands = [value(atom) for atom in eqn.invars]
            derived = inside or bool(differentiation_pass(str(eqn.source_info.name_stack)))
            if derived:
                self.differentiates = True
                self.used.update(*(operand.arguments for operand in operands))
            results = self._results(eqn, operands, derived)
            known.update(zip(eqn.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: jex_core.JaxprEqn, operands: list[_Value], derived: bool) -> list[_Value]:
        name, flow = eqn.primitive.name, control_flow(eqn)
        if isinstance(flow, Branches):
            ways = [self.run(branch.jaxpr, operands[1:], inside=derived) for branch in flow.branches]
            return [_either(values) for values in zip(*ways, strict=True)]
        if isinstance(flow, While):
            start = flow.n_condition_consts
            carried = start + flow.n_body_consts
            self.run(flow.condition.jaxpr, operands[:start] + operands[carried:], inside=derived)
            return self.run(flow.body.jaxpr, operands[start:], inside=derived)
        if flow is not None:
            return self.run(flow.body.jaxpr, operands, inside=derived)
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        if name == "dot_general":
            return [_Value(products=frozenset({_product(eqn, operands, avals)}))]
        if name in ("reduce_max", "argmax"):
            size = math.prod(avals[0].shape)
            self.searched |= {product: max(size, self.searched.get(product, 0)) for product in operands[0].products}
        if name in _MOVES:
            return [operands[0]] * len(eqn.outvars)
        elementwise = [operand for operand, aval in zip(operands, avals, strict=False) if aval.shape == avals[-1].shape]
        products = frozenset().union(*(operand.products for operand in elementwise))
        return [_Value(products=products) for _ in eqn.outvars]


def _either(values: Sequence[_Value]) -> _Value:
    return _Value(
        frozenset().union(*(value.arguments for value in values)),
        frozenset().union(*(value.products for value in values)),
    )


def _product(eqn: jex_core.JaxprEqn, operands: list[_Value], avals: list[Any]) -> _Product:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]

    def rows(aval: Any, axes: Sequence[int]) -> int:
        return math.prod(size for axis, size in enumerate(aval.shape) if axis not in axes)

    return _Product(
        operands[0].arguments,
        operands[1].arguments,
        rows(avals[0], (*left, *left_batch)),
        rows(avals[1], (*right, *right_batch)),
    )
