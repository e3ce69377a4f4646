"""What reports show in notebooks: tables as HTML, and lines of source."""

import html
import os
from collections.abc import Iterable
from typing import Any


def html_table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A table whose cells are the texts of what is given, escaped."""

    def line(tag: str, cells: Iterable[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table><thead>{line('th', head)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def line_of_source(file: str, line: int) -> str:
    """`file.py:12`; `cell:12` for the files under whose numbers Jupyter keeps its cells."""
    name = os.path.basename(file)
    return f"{'cell' if name.removesuffix('.py').isdigit() else name}:{line}"


def size_text(n_bytes: int) -> str:
    """`10.55 GiB`, in the largest unit of which there is one."""
    exponent = min(max(n_bytes, 1).bit_length() - 1, 39) // 10
    return f"{n_bytes} B" if exponent == 0 else f"{n_bytes / 2 ** (10 * exponent):.2f} {'KMG'[exponent - 1]}iB"
