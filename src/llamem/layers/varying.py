"""Loops and hand-written gradients inside `jax.shard_map`, and on meshes with Explicit axes.

Inside `shard_map` a value's type says over which mesh axes it differs. A loop's carry must keep that type, and so must
the gradients that a custom rule returns: what is the same on all devices is said to differ before it meets what does.
The gradient of this step is the sum over those axes. With `check_vma=False` nothing is said, and nothing is done.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding


def varying_axes(array: Any) -> frozenset[str]:
    """Return the mesh axes over which a value inside `jax.shard_map` is said to differ; none with `check_vma=False`."""
    aval = jax.typeof(array)
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # its name in JAX 0.10


def axes_of(tree: Any) -> frozenset[str]:
    """Return the mesh axes over which any of the arrays in a tree differs."""
    return frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """Return the same arrays, said to differ over these axes, too."""

    def vary_leaf(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return _differing(leaf, missing) if missing else leaf

    return jax.tree.map(vary_leaf, tree) if axes else tree


def vary_together(*trees: Any) -> tuple:
    """Return trees of arrays, all said to differ over the axes over which any of them does."""
    return vary(trees, axes_of(trees))


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """Return the mesh of the first array in a tree that lies on one with Explicit axes; None where there is none."""
    for leaf in jax.tree.leaves(tree):
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def partitioned(fn: Callable, specs: Any, *args: Any) -> Any:
    """Return `fn(*args)`; on a mesh with Explicit axes the compiler divides the work, results sharded as `specs`.

    A tile that is cut out of a sharded axis has no sharding that its type could say.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(fn, out_sharding=shardings)(*args)


def _differing(leaf: Any, axes: tuple[str, ...]) -> Any:
    if hasattr(lax, "pcast"):
        return lax.pcast(leaf, axes, to="varying")
    return vars(lax)["pvary"](leaf, axes)  # its name in JAX 0.7
