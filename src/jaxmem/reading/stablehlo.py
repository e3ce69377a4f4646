"""The one reader of StableHLO text, to which JAX lowers a traced program: what it computes, what its parts are called.

Two programs with one `arithmetic` are one program to a compiler. Their names may differ: the scopes of their
operations, and the lines of Python that asked for them.
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence

from jaxmem.common.printing import line_of_source

_STRING = r'"(?:[^"\\]|\\.)*"'
_INSIDE = rf'(?:{_STRING}|[^()"])*'
# What follows an operation or an argument; and the table of what those refer to, a line each.
_PLACE = re.compile(rf" loc\(({_INSIDE}(?:\({_INSIDE}\){_INSIDE})*)\)")
_TABLE = re.compile(r"^#(loc\d*) = loc\((.*)\)\n?", re.MULTILINE)
_FUNCTION = re.compile(rf"func\.func (?:public |private )?@({_STRING}|[\w.$-]+)")
# A kernel of Pallas's for TPUs, in bytes that hold lines of Python as well: known by what it was traced to.
_KERNEL = re.compile(r"(\\22body\\22: ?\\22)[^\\]*")


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program's `arithmetic`: its text without names, and its kernels; the `names` of its operations, in order.

    A name is a scope, and the number of a line among `lines`, which are `file.py:12`: programs whose lines were moved
    have the same names. What `jax.jit` calls is numbered by itself, after all else: JAX traces it once in a process,
    so that functions of its own have the lines of whatever called them first.
    """

    arithmetic: str
    names: str
    lines: tuple[str, ...]


def read_lowered(text: str, kernels: Sequence[str]) -> Lowered:
    """Read a module with its locations; `kernels`: the text of each of Pallas's in it (`kernel_texts`)."""
    table = dict(_TABLE.findall(text))
    resolved: dict[str, tuple[str, str]] = {}

    def named(place: str) -> tuple[str, str]:
        if place not in resolved:
            resolved[place] = _name_and_line(place, table, named)
        return resolved[place]

    body = _TABLE.sub("", text)
    own: list[tuple[str, str]] = []
    called: list[list[tuple[str, str]]] = []
    for function in re.split(r"^  (?=func\.func )", body, flags=re.MULTILINE):
        places = [named(place) for place in _PLACE.findall(function)]
        end = re.search(rf"^  }}{_PLACE.pattern}", function, re.MULTILINE)
        if end and named(end[1])[0].startswith("jit:"):
            called.append([place for place in places if not place[0].startswith("jit:")])  # the place of the call
        else:
            own += places
    names, lines = [], []
    for places in (own, *called):
        number = {line: i for i, line in enumerate(dict.fromkeys(line for _, line in places))}
        names += [f"{scope} {number[line]}" for scope, line in places]
        lines += number
    return Lowered("\n".join([_without_names(body, bool(kernels)), *kernels]), "\n".join(names), tuple(lines))


def digest(text: str) -> str:
    """Return what a long text is known again by."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _name_and_line(place: str, table: dict[str, str], named) -> tuple[str, str]:
    """Return the scope of an operation and the line that asked for it, the innermost; "" for what is not told."""
    if place.startswith("#"):
        return named(table.get(place[1:], ""))
    if file := re.match(rf"({_STRING}):(\d+):", place):
        return "", line_of_source(file[1][1:-1], int(file[2]))
    if scope := re.match(rf"({_STRING})(?:\((.*)\))?$", place):
        return scope[1][1:-1], named(scope[2])[1] if scope[2] else ""
    first = re.match(r"(?:callsite\(|fused(?:<.*?>)?\[)(#loc\d*)", place)
    return named(first[1]) if first else ("", "")


def _without_names(body: str, has_kernels: bool) -> str:
    body = _PLACE.sub("", body)
    functions = {name: f"f{i}" for i, name in enumerate(dict.fromkeys(_FUNCTION.findall(body)))}
    body = re.sub(rf"@({_STRING}|[\w.$-]+)", lambda at: f"@{functions.get(at[1], at[1])}", body)
    return _KERNEL.sub(r"\1", body) if has_kernels else body
