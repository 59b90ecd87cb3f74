"""`python -m manager`."""

import sys

from manager.cli import main

if __name__ == "__main__":
    sys.exit(main())
