"""What a report says beside its numbers: where they stop, and what of a program is probably not what was meant."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem.common.printing import size_text
from jaxmem.reading.provenance import Provenance
from jaxmem.report import Report
from jaxmem.tracing.arguments import Leaf, shard_bytes, shard_shape
from jaxmem.tracing.flops import Products
from jaxmem.tracing.jaxprs import (
    Scan,
    constants_in,
    control_flow,
    donates_itself,
    equations,
    inner_jaxprs,
    inputs_used,
    moved_to_host,
)

_SMALL = 2**20  # bytes of which nothing is said


def program_notes(
    report: Report,
    traced: jex_core.ClosedJaxpr,
    products: Products,
    leaves: Sequence[Leaf],
    provenance: Provenance,
    answer: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the warnings of a report on a traced program, its products, its arguments, and the compiler's answer."""
    chip = report.chip
    yield from _state_notes(traced, leaves)
    if kept := not_donated(leaves, provenance):
        names = " and ".join(f"`{argument_name(leaf)}`" for leaf in {leaf.argument: leaf for leaf in kept}.values())
        yield (
            f"{names}: {size_text(sum(leaf.bytes for leaf in kept))} are not donated, and their new values lie beside "
            f"them. jax.jit(step, donate_argnums={donated_with(leaves, kept)}), and the same for compile_report."
        )
    yield from _sharding_notes(report, traced, leaves)
    yield from _constant_notes(report, traced)
    yield from _sum_notes(traced, leaves)
    if products.loops:
        yield f"{products.loops} of its loops do not say how often they run: matrix products there count once."
    if answer["collectives"] is None:
        yield "what chips send to each other cannot be counted: a loop does not say how often it runs."
    names = {eqn.primitive.name for eqn, _ in equations(traced.jaxpr)}
    if not chip.has_bf16 and _multiplies_bf16(traced):
        yield (
            f"bf16 is not native on {chip.name}: its matrix products run in f32, on f32 copies of their operands, "
            "which count as temporaries, and at a fraction of the speed. Take float16 with a loss scale."
        )
    if chip.platform == "tpu" and report.peak_bytes < 512 * 2**20:
        yield "so small that much of it lives in on-chip memory (VMEM), which temporaries do not count."
    hosted = any(leaf.on_host for leaf in leaves) or moved_to_host(traced.jaxpr)
    if hosted and not report.host_bytes and not report.refused:
        yield (
            "the program moves arrays to the host's memory, and none arrived: the compiler kept them on the device."
            if chip.platform != "cpu"
            else "arrays in the host's memory count as the device's: on a CPU that is the same, and nothing is gained."
        )
    if not names & {"sharding_constraint", "shard_map"} and any(map(_is_cut_by_the_compiler, leaves)):
        yield (
            "its arguments are cut over a mesh and nothing inside is: how the work is shared, the compiler decides. A "
            "model that says so itself may do it only inside its contexts (jax.set_mesh, flax's axis_rules): the "
            "program is traced by this call, so open them around it."
        )
    if chip.capacity_bytes and 0.85 * chip.capacity_bytes < report.peak_bytes <= chip.capacity_bytes:
        yield "close to the limit, where the compiler rematerialises on its own: judge your remat on a roomier chip."
    if asked := answer.get("asked"):
        yield (
            f"the program asks which device it runs on, {asked[0]}, and hears of this machine's: where it chooses by "
            f"that, this is not its program for {chip.name}. Let it ask jaxmem.compiling_for()."
        )
    if (inside := answer.get("kernel_array_bytes", 0)) > _SMALL:
        yield (
            "this CPU's compiler put products and what follows them into kernels of its own, and what those need while "
            f"they run is not in these numbers: an array of {size_text(inside)} is made or held inside of one."
        )
    if "products_by_library" in answer:
        yield (
            "compiled with all matrix products by cuBLAS: this compiler finds no tiles for one of them where no GPU is "
            "there to try them on. On the GPU itself the compiler chooses for each, so that memory may differ a little."
        )


def argument_name(leaf: Leaf) -> str:
    """Return what the whole argument is called that an array belongs to."""
    return leaf.name.partition("[")[0].partition(".")[0] or f"argument {leaf.argument}"


def not_donated(leaves: Sequence[Leaf], provenance: Provenance) -> list[Leaf]:
    """Return the arrays that a training step returns new values of and does not donate; none where they are small."""
    kept = [leaves[i] for i in sorted(provenance.replaced) if not leaves[i].donated and not leaves[i].on_host]
    return kept if sum(leaf.bytes for leaf in kept) > _SMALL else []


def donated_with(leaves: Sequence[Leaf], more: Sequence[Leaf]) -> tuple[int, ...]:
    """Return `donate_argnums` with the arguments of more arrays."""
    return tuple(sorted({leaf.argument for leaf in leaves if leaf.donated} | {leaf.argument for leaf in more}))


def whole_beside_cut(leaves: Sequence[Leaf]) -> dict[int, jax.sharding.NamedSharding]:
    """Return by number which arrays lie whole on each chip, though others of their shape are cut, and how these are."""
    cut = {leaf.shape.shape: leaf.shape.sharding for leaf in leaves if leaf.bytes < shard_bytes(_unsharded(leaf))}
    return {
        i: cut[leaf.shape.shape]
        for i, leaf in enumerate(leaves)
        if leaf.shape.shape in cut and leaf.bytes == shard_bytes(_unsharded(leaf)) and not leaf.on_host
    }


def _unsharded(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape.shape, leaf.shape.dtype)


def _sharding_notes(report: Report, traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield arrays that lie whole where their like are cut, and donated ones whose results lie in another way."""
    whole = whole_beside_cut(leaves)
    for argument in dict.fromkeys(leaves[i].argument for i in whole):
        own = [i for i in whole if leaves[i].argument == argument]
        name, size = argument_name(leaves[own[0]]), sum(leaves[i].bytes for i in own)
        if size > _SMALL:
            yield (
                f"`{name}` lies whole on each chip ({size_text(size)} in {len(own)} arrays), and arrays of the same "
                "shapes are cut over the mesh: jax.eval_shape keeps no shardings. Give it theirs, of optax's moments "
                "optax.tree_map_params(optimizer, lambda m, w: jax.ShapeDtypeStruct(m.shape, m.dtype, "
                f"sharding=w.sharding), {name}, weights)."
            )
    results = {(out.shape, out.dtype) for out in traced.out_avals}
    donated = [leaf for leaf in leaves if leaf.donated and (leaf.shape.shape, leaf.shape.dtype) in results]
    lost = sum(leaf.bytes for leaf in donated if not leaf.on_host) - report.alias_bytes
    if report.chip.devices > 1 and lost > _SMALL and not report.refused:
        yield (
            f"{size_text(lost)} of what is donated are not used again: results of the same shapes lie over the chips "
            "in another way than their arguments. Give both one sharding, by jax.lax.with_sharding_constraint."
        )


def _is_cut_by_the_compiler(leaf: Leaf) -> bool:
    """Return whether an argument is cut over devices of a mesh on which the compiler decides how to go on."""
    sharding = leaf.shape.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.is_fully_replicated:
        return False
    return jax.sharding.AxisType.Auto in sharding.mesh.axis_types


def _multiplies_bf16(traced: jex_core.ClosedJaxpr) -> bool:
    products = (eqn for eqn, _ in equations(traced.jaxpr) if eqn.primitive.name == "dot_general")
    return any(str(var.aval.dtype) == "bfloat16" for eqn in products for var in eqn.invars)  # pyrefly: ignore


def _state_notes(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield a donation of which the report was not told, a state that is donated and not given back, and arguments
    without which every result is the same.
    """
    results = {(out.shape, out.dtype) for out in traced.out_avals}
    arguments = dict.fromkeys(leaf.argument for leaf in leaves)
    used = inputs_used(traced) if leaves else []
    if donates_itself(traced.jaxpr) and not any(leaf.donated for leaf in leaves):
        yield (
            "the function donates arguments, as jax.jit(donate_argnums=) has it, and inside of another program that "
            "means nothing: they count as kept. Tell the report, compile_report(..., donate_argnums=(0,))."
        )
    for argument in arguments:
        own = [i for i, leaf in enumerate(leaves) if leaf.argument == argument]
        name = argument_name(leaves[own[0]])
        donated = sum(leaves[i].bytes for i in own if leaves[i].donated)
        returned = any((leaves[i].shape.shape, leaves[i].shape.dtype) in results for i in own)
        if donated > _SMALL and not returned:
            yield (
                f"`{name}` is donated ({size_text(donated)}), and nothing of it is given back: no result has the shape "
                "and type of one of its arrays. A step that changes its state has to return it."
            )
        idle = sum(leaves[i].bytes for i in own if not used[i])
        if idle > _SMALL:
            yield (
                f"{size_text(idle)} of `{name}` reach no result: the compiler leaves out what is computed with them. "
                "A step that updates an optimizer's state and weights has to return both."
            )


def _sum_notes(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield a loop that adds up arrays like those of an argument, as gradient accumulation does."""
    if sums := sums_of_gradients(traced, leaves):
        yield (
            f"a loop adds up {size_text(sum(map(shard_bytes, sums)))} in {sums[0].dtype.name}, as gradient "
            "accumulation does. They lie beside the gradients of a part from the first part to the last, so that 2 "
            "parts can need more memory than 1."
        )


def sums_of_gradients(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> list[Any]:
    """Return the types of what a loop adds up of arrays like those of an argument; none where no loop does."""
    shapes = [shard_shape(leaf.shape) for leaf in leaves if jnp.issubdtype(leaf.shape.dtype, jnp.floating)]
    for sums in _sums_of_loops(traced.jaxpr):
        alike = [aval for aval in sums if aval.shape in shapes]
        # Not the gradients of a few arrays, such as a tiled loss adds up: of weights beside two moments it is a third.
        if len(alike) > 1 and sum(a.size for a in alike) > sum(map(math.prod, shapes)) / 4:
            return alike
    return []


def _sums_of_loops(jaxpr: jex_core.Jaxpr) -> Iterator[list[Any]]:
    """Yield for each scan the types of what it carries from zeros on."""
    makers = {id(var): eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def is_zeros(var: Any) -> bool:
        made = makers.get(id(var))
        return made is not None and all(isinstance(x, jex_core.Literal) and np.all(x.val == 0) for x in made.invars)

    for eqn in jaxpr.eqns:
        if isinstance(flow := control_flow(eqn), Scan):
            carried = eqn.invars[flow.n_consts : flow.n_consts + flow.n_carry]
            yield [var.aval for var in carried if is_zeros(var)]
        for inner in inner_jaxprs(eqn):
            yield from _sums_of_loops(inner)


def _constant_notes(report: Report, traced: jex_core.ClosedJaxpr) -> Iterator[str]:
    if report.constant_bytes <= _SMALL:
        return
    closed = sorted(constants_in(traced), key=lambda row: -shard_bytes(row[0]))[:3]
    named = [f"{const.dtype}{list(const.shape)}{f' in {line}' if line else ''}" for const, line in closed]
    yield (
        f"{size_text(report.constant_bytes)} are constants: arrays that are closed over, not passed"
        f"{' (' + ', '.join(named) + ')' if named else ''}. They count as temporaries. Pass them as arguments."
    )
