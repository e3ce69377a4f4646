"""`python -m llamem_course`: the course for a class, to hand out without what it gives away, and to grade."""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from llamem_course.grading import Row, grade
from llamem_course.hand_out import write_hand_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked; return 0, or 2 where it cannot be done, with a sentence that says why."""
    parser = argparse.ArgumentParser(
        prog="python -m llamem_course",
        description="Write the notebooks of the course for a class: without cells tagged `solution`, without the "
        "outputs of cells tagged `predict`, whose question a reader answers first, and without badges. Or check the "
        "exercises of notebooks that came back, and print a table as CSV. That runs what students wrote: do it where "
        "it can do no harm.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--hand-out", type=Path, metavar="FOLDER", help="a new folder, or an empty one")
    what.add_argument("--grade", type=Path, metavar="FOLDER", help="where notebooks that came back lie, at any depth")
    add = parser.add_argument
    add("--only", metavar="NUMBER", help="hand out one notebook, such as 04")
    add("--from", dest="source", type=Path, default=Path("notebooks"), help="the course's own; default notebooks")
    given = parser.parse_args(arguments)
    try:
        if given.grade:
            table = csv.writer(sys.stdout, lineterminator="\n")
            table.writerow(Row._fields)
            table.writerows(grade(given.grade, given.source))
        else:
            print(write_hand_out(given.source, given.hand_out, given.only))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
