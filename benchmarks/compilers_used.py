"""Whose word the benchmarks' tables are: versions for a table's head."""

from jaxmem.chips.compilers import find_compilers


def compilers_used(*targets: str) -> str:
    """Return "jax 0.10.1, libtpu 0.0.51, own folder" for the compilers of the named targets, "tpu" unless told.

    Exit with the line that fetches them where there are none.
    """
    names = []
    for target in targets or ("tpu",):
        compilers = find_compilers(target)
        if compilers is None:
            raise SystemExit(f"No compilers for {target} here: python -m jaxmem compilers")
        names.append(compilers.name)
    return "; ".join(names)
