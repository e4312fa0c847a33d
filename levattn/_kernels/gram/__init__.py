"""Kernels of second moments, of squared norms in another basis, and of both for sparse keys."""
