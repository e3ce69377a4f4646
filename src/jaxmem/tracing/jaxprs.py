"""Walks over traced programs, and every use of what JAX does not promise to keep as it is."""

import dataclasses
import functools
import math
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from jaxmem.common.printing import line_of_source


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `lax.scan`: its body takes `n_consts` constants, `n_carry` carried values and one slice of each input."""

    body: jex_core.ClosedJaxpr
    n_consts: int
    n_carry: int
    length: int


@dataclasses.dataclass(frozen=True)
class While:
    """A `lax.while_loop`: operands are the constants of the condition, those of the body, and the carried values."""

    condition: jex_core.ClosedJaxpr
    body: jex_core.ClosedJaxpr
    n_condition_consts: int
    n_body_consts: int


@dataclasses.dataclass(frozen=True)
class Branches:
    """A `lax.cond` or `lax.switch`: the first operand chooses the branch, which takes the others."""

    branches: tuple[jex_core.ClosedJaxpr, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A function called as it stands: jit, a custom derivative, a checkpoint."""

    body: jex_core.ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """A `jax.shard_map`: every device of a mesh runs the body on its parts of the operands."""

    body: jex_core.ClosedJaxpr
    mesh: Any
    axes: tuple[str, ...]  # over which devices run it; none of those that the compiler shares out by itself
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]

    @property
    def devices(self) -> int:
        """How many run it."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


Flow = Scan | While | Branches | Call | OnDevices


_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])


def names_in(jaxpr: jex_core.Jaxpr) -> dict[str, bool]:
    """Return every `checkpoint_name` in a jaxpr, and whether a value that bears it is used.

    Those inside scans, calls and checkpoints are included; not those in the function of a `jax.custom_vjp`: its forward
    rule takes that function's place.
    """
    names: dict[str, bool] = {}
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if (name := given_name(eqn)) is not None:
            names[name] = names.get(name, False) or id(eqn.outvars[0]) in used
        for inner in inner_jaxprs(eqn) if not has_own_gradient(eqn) else ():
            for name, is_used in names_in(inner).items():
                names[name] = names.get(name, False) or is_used
    return names


def has_own_gradient(eqn: jex_core.JaxprEqn) -> bool:
    """Return whether the operation is a call of a `jax.custom_vjp`, whose rules JAX traces when it differentiates."""
    return eqn.primitive.name.startswith("custom_vjp_call")


def given_name(eqn: jex_core.JaxprEqn) -> str | None:
    """Return the name that this operation gives to its result with `checkpoint_name`; None for any other operation."""
    # With jax_remat3 a name, like a checkpoint, is an object of its own inside one kind of operation.
    named: Any = eqn.params.get("_prim")
    if type(named).__name__ == "CheckpointName":
        return named.params["name"]
    return eqn.params["name"] if eqn.primitive.name == "name" else None


def equations(
    jaxpr: jex_core.Jaxpr, times: int = 1, *, of_all_devices: bool = False
) -> Iterator[tuple[jex_core.JaxprEqn, int]]:
    """Yield every operation of a program, those inside others included, and how often scans make it run.

    `of_all_devices`: inside a `shard_map` it runs once on each device, and otherwise is counted for one of them.
    """
    for eqn in jaxpr.eqns:
        yield eqn, times
        runs = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        if of_all_devices and isinstance(flow := control_flow(eqn), OnDevices):
            runs *= flow.devices
        for inner in inner_jaxprs(eqn):
            yield from equations(inner, runs, of_all_devices=of_all_devices)


def inner_jaxprs(eqn: jex_core.JaxprEqn) -> list[Any]:
    """Return the programs inside one operation: a loop's body, a call's function, a cond's branches."""
    return [getattr(program, "jaxpr", program) for program in _programs_in(eqn)]


def _programs_in(eqn: jex_core.JaxprEqn) -> list[Any]:
    kinds = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
    of_object = getattr(eqn.params.get("_prim"), "params", {})
    params = (*eqn.params.values(), *of_object.values())
    params = jax.tree.leaves(params, is_leaf=lambda param: isinstance(param, kinds))
    return [param for param in params if isinstance(param, kinds)]


def scan_parts(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
    """Return how many constants and how many carried values a scan has: the first and the next of its operands."""
    if "ft_in" in eqn.params:  # since JAX 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return eqn.params["num_consts"], eqn.params["num_carry"]


# What draws random numbers; where a layer decides something (experts, for instance); matrix products.
DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator")
CHOICES = ("top_k", "argmax", "argmin", "sort")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")
# Kernels that JAX does not see into: Pallas's, cuDNN's attention, calls of the user's own. How their names begin.
KERNELS = ("pallas_call", "dot_product_attention", "ffi_call", "custom_call")


@dataclasses.dataclass(frozen=True)
class CheckpointCall:
    """One use of `jax.checkpoint` in a traced program: the function under it, and its options."""

    body: jex_core.Jaxpr
    policy: Any
    prevent_cse: bool


def checkpoint_call(eqn: jex_core.JaxprEqn) -> CheckpointCall | None:
    """Return the checkpoint that this operation is; None for any other operation."""
    # With jax_remat3 a checkpoint, like a name, is an object of its own inside one kind of operation.
    prim: Any = eqn.params.get("_prim")
    if not (eqn.primitive.name in ("checkpoint", "remat", "remat2") or type(prim).__name__.startswith("Remat")):
        return None
    options = getattr(prim, "params", eqn.params)
    body = getattr(options["jaxpr"], "jaxpr", options["jaxpr"])
    return CheckpointCall(body, options["policy"], bool(options.get("prevent_cse", True)))


def differentiation_pass(path: str) -> Literal["forward", "backward", "run again", ""]:
    """Return the pass that an operation belongs to, by its `op_name`: JAX writes there how it was derived.

    "" for an operation outside of anything differentiated, as an optimizer's are.
    """
    if "rematted_computation" in path:
        return "run again"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else ""


def computed_again(eqn: jex_core.JaxprEqn) -> bool:
    """Return whether JAX marked the operation as one that a checkpoint computes again, in the backward pass."""
    return "rematted_computation" in str(eqn.source_info.name_stack)


def vmaps_around(eqn: jex_core.JaxprEqn) -> int:
    """Return how many `jax.vmap`s an operation was traced in, without those around the program that it stands in."""
    return str(eqn.source_info.name_stack).count("vmap(")


def policy_arguments(policy: Any) -> dict[str, Any]:
    """Return what one of JAX's policy factories was called with; empty for a policy that is a plain function."""
    # Attributes in newer JAX, the closure of a function in older.
    if policy is None or isinstance(policy, type):
        return {}
    code, cells = getattr(policy, "__code__", None), getattr(policy, "__closure__", None)
    arguments = dict(vars(policy)) if hasattr(policy, "__dict__") else {}
    if code is not None and cells:
        arguments |= {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    for name in ("policy_1", "policy_2"):  # of save_from_both_policies
        inner = policy_arguments(arguments[name]) if name in arguments else {}
        arguments |= {f"{name} {key}" if is_names(value) else key: value for key, value in inner.items()}
    return arguments


def is_names(value: Any) -> bool:
    """Return whether an argument of a policy factory is a collection of names."""
    return isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(name, str) for name in value)


def host_function(eqn: jex_core.JaxprEqn) -> Callable[..., Any] | None:
    """Return the function on the host that a `jax.pure_callback` asks, of arrays; None for any other operation."""
    return eqn.params["callback"] if eqn.primitive.name == "pure_callback" else None


def tells_the_host(eqn: jex_core.JaxprEqn) -> bool:
    """Return whether the operation runs a function on the host for its effect. Printing does not count."""
    # Before JAX 0.8 jax.debug.print was such a callback too; its closure gives it away.
    cells = getattr(eqn.params.get("callback"), "__closure__", None) or ()
    prints = any("_format_print_callback" in repr(cell.cell_contents) for cell in cells)
    return eqn.primitive.name in ("debug_callback", "io_callback") and not prints


def names_when_differentiated(jaxpr: jex_core.ClosedJaxpr) -> set[str]:
    """Return every `checkpoint_name` of a program, those given in the forward rule of a `jax.custom_vjp` included."""
    names = set(names_in(jaxpr.jaxpr))
    if any(has_own_gradient(eqn) for eqn, _ in equations(jaxpr.jaxpr)):
        # The rule is a function that JAX traces when it differentiates: so differentiate.
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]

        def differentiated(*values: Any) -> Any:
            return jax.vjp(jex_core.jaxpr_as_fun(jaxpr), *values)[1]

        names |= set(names_in(jax.make_jaxpr(differentiated)(*shapes).jaxpr))
    return names


def control_flow(eqn: jex_core.JaxprEqn) -> Flow | None:
    """Return how an operation runs the programs inside it; None where it has none, or runs them in an unknown way."""
    params, name = eqn.params, eqn.primitive.name
    if (checkpoint := checkpoint_call(eqn)) is not None:
        return Call(jex_core.ClosedJaxpr(checkpoint.body, ()))
    if name == "scan":
        return Scan(params["jaxpr"], *scan_parts(eqn), params["length"])
    if name == "while":
        counts = params["cond_nconsts"], params["body_nconsts"]
        return While(params["cond_jaxpr"], params["body_jaxpr"], *counts)
    if name == "cond":
        return Branches(tuple(params["branches"]))
    if name == "shard_map":
        body = jex_core.ClosedJaxpr(params["jaxpr"], ())
        manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        axes = tuple(axis for axis in params["mesh"].axis_names if axis in manual)
        return OnDevices(body, params["mesh"], axes, params["in_specs"], params["out_specs"])
    if name == "pallas_call":
        return None
    programs = [value for value in params.values() if isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))]
    if len(programs) != 1:
        return None
    body = programs[0] if isinstance(programs[0], jex_core.ClosedJaxpr) else jex_core.ClosedJaxpr(programs[0], ())
    # A reduction's or a scatter's program takes two elements, not the operands.
    inside, outside = (
        [getattr(var.aval, "shape", None) for var in (*program.invars, *program.outvars)]
        for program in (body.jaxpr, eqn)
    )
    return Call(body) if inside == outside and len(body.jaxpr.constvars) == len(body.consts) else None


def inputs_passed_on(jaxpr: jex_core.Jaxpr) -> list[int | None]:
    """Return for each result of a program the number of the input that it is, as it came; None where it is computed.

    Followed through calls, checkpoints, loops, branches and shards.
    """
    came_from = {var: i for i, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for result, operand in zip(eqn.outvars, _operands_passed_on(eqn), strict=True):
            source = None if operand is None else eqn.invars[operand]
            if isinstance(source, jex_core.Var) and source in came_from:
                came_from[result] = came_from[source]
    return [came_from.get(var) if isinstance(var, jex_core.Var) else None for var in jaxpr.outvars]


def _operands_passed_on(eqn: jex_core.JaxprEqn) -> list[int | None]:
    """Return for each result of an operation the number of the operand that it is; None where it is computed."""
    match control_flow(eqn):
        case Call(body):
            return inputs_passed_on(body.jaxpr)
        case Scan(body, n_consts, n_carry):
            inner = inputs_passed_on(body.jaxpr)
            carried = [i if i == n_consts + j else None for j, i in enumerate(inner[:n_carry])]
            slices = [i if i is not None and i >= n_consts + n_carry else None for i in inner[n_carry:]]
            return carried + slices
        case While(_, body, n_condition_consts, n_body_consts):
            inner = inputs_passed_on(body.jaxpr)
            stays = [i == n_body_consts + j for j, i in enumerate(inner)]
            return [n_condition_consts + n_body_consts + j if same else None for j, same in enumerate(stays)]
        case Branches(branches):
            each = zip(*(inputs_passed_on(branch.jaxpr) for branch in branches), strict=True)
            return [1 + i[0] if i[0] is not None and len(set(i)) == 1 else None for i in each]
        case OnDevices(body, in_specs=in_specs, out_specs=out_specs):
            inner = inputs_passed_on(body.jaxpr)
            return [
                i if i is not None and in_specs[i] == spec else None for i, spec in zip(inner, out_specs, strict=True)
            ]
    return [None] * len(eqn.outvars)


def moved_to_host(jaxpr: jex_core.Jaxpr) -> int:
    """Count the bytes that a program asks to be put on the host, as offloading policies write it, loops multiplied.

    Of all devices together.
    """
    total = 0
    for eqn, times in equations(jaxpr, of_all_devices=True):
        # Not a sharding's whole text, in which an axis may be called "hosts".
        places = [getattr(place, "memory_kind", place) for place in eqn.params.get("devices", ())]
        if eqn.primitive.name == "device_put" and "host" in str(places).lower():
            avals: list[Any] = [var.aval for var in eqn.outvars]
            total += times * sum(aval.size * aval.dtype.itemsize for aval in avals)
    return total


# What a kernel of Pallas's is: its program, its grid and blocks, what its compiler is told. Not the lines it is from.
_OF_KERNELS = ("jaxpr", "grid_mapping", "compiler_params", "cost_estimate", "input_output_aliases", "interpret")
_OF_KERNELS += ("out_avals", "backend", "mesh", "name", "metadata")


def kernel_texts(jaxpr: jex_core.Jaxpr) -> list[str]:
    """Return what each of Pallas's kernels in a program computes and how, as text without lines of Python.

    Empty where the program has kernels of another kind as well, by Mosaic's own call.
    """
    operations = [eqn for eqn, _ in equations(jaxpr)]
    if any(eqn.primitive.name == "tpu_custom_call" for eqn in operations):
        return []
    texts = []
    for eqn in operations:
        if eqn.primitive.name == "pallas_call":
            blocks = getattr(eqn.params.get("grid_mapping"), "block_mappings", ())
            maps = [getattr(block, "index_map_jaxpr", None) for block in blocks]
            parts = [*(eqn.params.get(name) for name in _OF_KERNELS), *maps]
            texts.append(re.sub(r" at 0x[0-9a-f]+", "", "\n".join(map(str, parts))))
    return texts


def callbacks_in(jaxpr: jex_core.Jaxpr) -> list[str]:
    """Return the names of the operations that call Python while the program runs, `jax.debug.print` among them."""
    names = {eqn.primitive.name for eqn, _ in equations(jaxpr)}
    return sorted(name for name in names if "callback" in name or name == "debug_print")


def same_value_before(
    jaxpr: jex_core.Jaxpr, eqn: jex_core.JaxprEqn, var: jex_core.Var
) -> tuple[jex_core.Jaxpr, jex_core.Var] | None:
    """Return where `var`'s value, a result of `eqn` in `jaxpr`, stood before: inside a loop or call, or as its operand.

    None where `eqn` itself computed it, gave it a name, or hands it out of a loop in which nothing changes it.
    """
    if given_name(eqn) is not None:
        return None
    inner = inner_program(eqn)
    if inner is None:
        # Casting to the same precision is how JAX marks a residual; what it casts is the answer.
        operand = eqn.invars[0] if eqn.primitive.name == "reduce_precision" else None
        return (jaxpr, operand) if isinstance(operand, jex_core.Var) else None
    inside = inner.outvars[eqn.outvars.index(var)]
    if not isinstance(inside, jex_core.Var):
        return None
    if inside not in inner.invars or len(inner.invars) != len(eqn.invars):
        return inner, inside
    operand = eqn.invars[inner.invars.index(inside)]
    passes_on = eqn.primitive.name != "scan" and isinstance(operand, jex_core.Var)
    return (jaxpr, operand) if passes_on else None


def inner_program(eqn: jex_core.JaxprEqn) -> Any:
    """Return the program inside a loop, call or checkpoint that computes its results, or None."""
    return next((inner for inner in inner_jaxprs(eqn) if len(inner.outvars) == len(eqn.outvars)), None)


def source_of(eqn: jex_core.JaxprEqn) -> str:
    """Return the line of Python outside of libraries that led to an operation, `file.py:12`, or ""."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    own = next((frame for frame in frames if not _is_library(frame.file_name)), None)
    return "" if own is None else line_of_source(own.file_name, own.line_num)


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, str(Path(__file__).parents[1]), "<frozen"))


def donates_itself(jaxpr: jex_core.Jaxpr) -> bool:
    """Return whether a program calls a function that donates, as `jax.jit(donate_argnums=)` makes them."""
    return any(any(eqn.params.get("donated_invars", ())) for eqn in jaxpr.eqns)


def inputs_used(jaxpr: jex_core.ClosedJaxpr) -> list[bool]:
    """Return whether each argument of a program changes a result or an effect of it."""
    return partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[1]


def outputs_computed(jaxpr: jex_core.ClosedJaxpr) -> list[bool]:
    """Return of each result of a program whether it is computed of an argument; a constant, such as zeros, is not."""
    known: set[Any] = set(jaxpr.jaxpr.invars)
    for eqn in jaxpr.jaxpr.eqns:
        if any(not isinstance(var, jex_core.Literal) and var in known for var in eqn.invars):
            known.update(eqn.outvars)
    return [not isinstance(var, jex_core.Literal) and var in known for var in jaxpr.jaxpr.outvars]


def is_ref(value: Any) -> bool:
    """Return whether a value is a mutable array, as `jax.new_ref` makes."""
    return (
        hasattr(value, "dtype")
        and not isinstance(value, jax.ShapeDtypeStruct | np.ndarray)
        and (
            type(getattr(value, "aval", None)).__name__ == "AbstractRef"
            or type(value).__name__ in ("Ref", "MutableArray")
        )
    )


def constants_in(jaxpr: jex_core.ClosedJaxpr) -> Iterator[tuple[Any, str]]:
    """Yield the arrays that a program closes over, those of programs inside it included, and a line that uses each."""
    inside = [program for eqn, _ in equations(jaxpr.jaxpr) for program in _programs_in(eqn)]
    seen: set[int] = set()
    for closed in (jaxpr, *(program for program in inside if isinstance(program, jex_core.ClosedJaxpr))):
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if hasattr(value, "dtype") and id(value) not in seen:
                seen.add(id(value))
                yield value, next((source_of(eqn) for eqn in closed.jaxpr.eqns if var in eqn.invars), "")
