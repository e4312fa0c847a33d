"""Everything that a CUDA device has to show, in one run that goes on where it was cut off: ``python -m tests.gpu``."""
