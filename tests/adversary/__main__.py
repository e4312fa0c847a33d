"""The search, as ``python -m tests.adversary``."""

import sys

from .search import main

if __name__ == "__main__":
    sys.exit(main())
