"""``python -m levattn.cli``."""

from levattn.cli import main

main()
