"""Files of reports, by chip: what `python -m jaxmem report --json` writes and `python -m jaxmem diff` reads."""

import json
from collections.abc import Mapping
from pathlib import Path

from jaxmem.common.files import read_json, write_whole
from jaxmem.report import SCHEMA, Report

_MOST_BYTES = 200_000_000


def write_reports(file: Path, reports: Mapping[str, Report]) -> None:
    """Write reports by chip into one JSON file: `{"schema": 1, "reports": {chip: what Report.to_json writes}}`."""
    write_whole(file, json.dumps({"schema": SCHEMA, "reports": {name: one.plain() for name, one in reports.items()}}))


def read_reports(file: Path) -> dict[str, Report]:
    """Return the reports of a file that `write_reports` wrote, by chip.

    Raises OSError where it cannot be read, ValueError, with the file's name, where it is no such file.
    """
    whole = read_json(file, _MOST_BYTES)
    reports = whole.get("reports")
    if whole.get("schema") != SCHEMA or not isinstance(reports, dict) or not reports:
        raise ValueError(
            f"{file} holds no reports of schema {SCHEMA}: expected what `python -m jaxmem report ... --json {file}` "
            "writes."
        )
    try:
        return {chip: Report.from_plain(plain) for chip, plain in reports.items()}
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
