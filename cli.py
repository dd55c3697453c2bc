"""`python cli.py ...` from a checkout is the same as the console script `deepinfer-bench ...`."""

import sys

from bench.commands import main

if __name__ == "__main__":
    sys.exit(main())
