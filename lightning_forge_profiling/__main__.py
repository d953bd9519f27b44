"""`python -m lightning_forge_profiling` is `forge-profiling`."""

import sys

from lightning_forge_profiling.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
