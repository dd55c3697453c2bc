"""`python cli.py ...` from a checkout is the same as the console script `deepinfer-bench ...`."""

import sys

from bench.commands import main  # an interrupt in here ends the program by itself

if __name__ == "__main__":
    sys.exit(main())
