"""`python -m weightsync`: the command line, also where nothing is installed but the dependencies."""

from __future__ import annotations

import sys

from weightsync.cli import main

if __name__ == "__main__":
    sys.exit(main())
