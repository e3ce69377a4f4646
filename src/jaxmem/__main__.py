"""`python -m jaxmem compilers`: fetch the compilers of chips that are not there, or remove them."""

import argparse
import sys
from collections.abc import Sequence

from jaxmem.chips.compilers import fetch_compilers, find_compilers, remove_compilers

_NOTHING = "nothing. Nothing there bears the mark of what jaxmem fetched; older versions left none."


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch or remove what is asked for, and print where; return 0, or 2 with a sentence where it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m jaxmem", description="Memory of JAX programs, by real compilers.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_arguments(commands.add_parser("compilers", help="fetch the compilers of chips that are not there"))
    return _run(parser.parse_args(arguments))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", choices=("tpu", "gpu", "all"), default="all", help="whose compilers; default all")
    description = "the folder; default $LLAMEM_COMPILERS or ~/.cache/llamem/compilers"
    parser.add_argument("--path", help=description)
    parser.add_argument("--remove", action="store_true", help="remove all that were fetched, and nothing else")


def _run(given: argparse.Namespace) -> int:
    try:
        if given.remove:
            removed = remove_compilers(given.path)
            print("removed: " + (", ".join(map(str, removed)) or _NOTHING))
            return 0
        print(f"compilers: {fetch_compilers(given.chip, path=given.path)}")
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for target in ("tpu", "cuda") if given.path is None else ():
        if compilers := find_compilers(target):
            print(f"for {target}: {compilers.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
