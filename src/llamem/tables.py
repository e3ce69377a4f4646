"""Tables for notebooks, as HTML."""

import html
from collections.abc import Iterable
from typing import Any


def html_table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A table whose cells are the texts of what is given, escaped."""

    def line(tag: str, cells: Iterable[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table><thead>{line('th', head)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
