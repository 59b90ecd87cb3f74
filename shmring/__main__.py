"""`python -m shmring` is the command `shmring`."""

import sys

from shmring.cli import main

if __name__ == "__main__":
    sys.exit(main())
