"""`python -m jaxmem`: the commands of the package."""

import sys

from jaxmem.command import main

if __name__ == "__main__":
    sys.exit(main())
