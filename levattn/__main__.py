"""``python -m levattn`` is the program ``levattn``."""

from levattn.cli import main

if __name__ == "__main__":
    main()
