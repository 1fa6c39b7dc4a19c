"""`python -m brax_concurrent` is the command `brax-concurrent`."""

import sys

from brax_concurrent.cli import main

if __name__ == "__main__":
    sys.exit(main())
