"""`python -m llamem`: the commands of the package."""

import sys

from llamem.planner.command import main

if __name__ == "__main__":
    sys.exit(main())
