"""What answers look like: one table for text and for notebooks, lines of source, sizes."""

import dataclasses
import html
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under a head: as text with `str`, as HTML at the end of a notebook's cell.

    Cells are shown by `str`. In text the first column is aligned to the left, and any other whose cells are all numbers
    (or begin with one) to the right.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        lines = [[str(cell) for cell in line] for line in (self.head, *self.rows)]
        columns = list(zip(*lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        right = [i > 0 and all(re.match(r"[-+]?\d|$", cell) for cell in column[1:]) for i, column in enumerate(columns)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        rows = "".join(_html_line("td", row) for row in self.rows)
        return f"<table><thead>{_html_line('th', self.head)}</thead><tbody>{rows}</tbody></table>"


def _html_line(tag: str, cells: Iterable[Any]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


class Shown:
    """An answer that is sentences and tables: both its text and its HTML are made of what `parts_shown` returns."""

    def parts_shown(self) -> Iterable[str | Table]:
        """Return the sentences and tables, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts_shown()))

    def __repr__(self) -> str:  # at a prompt, and where a notebook shows no HTML
        return str(self)

    def _repr_html_(self) -> str:
        parts = self.parts_shown()
        return "".join(
            part._repr_html_() if isinstance(part, Table) else f"<p>{'<br>'.join(html.escape(part).splitlines())}</p>"
            for part in parts
        )


def line_of_source(file: str, line: int) -> str:
    """Return `file.py:12`; `cell:12` for the files under whose numbers Jupyter keeps its cells."""
    name = os.path.basename(file)
    return f"{'cell' if name.removesuffix('.py').isdigit() else name}:{line}"


def size_text(n_bytes: int) -> str:
    """Return a size as `10.55 GiB`, in the largest unit of which there is one."""
    exponent = min(max(n_bytes, 1).bit_length() - 1, 39) // 10
    return f"{n_bytes} B" if exponent == 0 else f"{n_bytes / 2 ** (10 * exponent):.2f} {'KMG'[exponent - 1]}iB"
