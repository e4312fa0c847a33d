"""Types of arrays that many modules use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
