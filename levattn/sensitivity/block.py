"""The block certificate, for every even function of known growth that does not decrease in abs(x)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import take_rows, to_numpy
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.functions import Power, Softmax, is_square
from levattn.linalg.factor import Factor
from levattn.linalg.routes import factor_moments
from levattn.sensitivity.contract import Certificate, Problem, by_chunks, raised_scores
from levattn.sensitivity.lewis import iterated

_BLOCK_ITERATIONS = 3  # of the Lewis weights of a block
_TOGETHER, _ROWS = 16, 1 << 14  # blocks whose factors are in memory together, and keys that they score together
_MOST_IN_VAIN = 256  # blocks, where none of their bounds falls below ε


def _of_each(problem: Problem) -> tuple[Float64, None]:
    rows, growth = problem.rows, max(2.0, problem.growth)
    each = [_block(rows.item(i), growth, problem.epsilon, problem.rng) for i in range(len(problem.tau))]
    return np.stack(each), None


def _block(rows: Rows, p: float, epsilon: float, rng: int | np.random.Generator | None) -> Float64:
    """Bound the sensitivity of all even monotone functions of growth p ≥ 2, for a batch of one.

    Let ⟨k_j, y⟩ = 1, and let 1/t be the least ‖K_b y‖_p^p of a block b of rows. It adds at least min(1, 1/t) to
    Σ min(1, |⟨k_l, y⟩|^p): an entry is at least 1, or the powers sum to at least 1/t. In the block of key j, the key
    itself adds 1, and the other keys add at least min(1, 1/t − 1).
    """
    n = rows.shape[1]
    present = np.arange(n) if rows.mask is None else np.flatnonzero(to_numpy(rows.mask)[0])
    present = present.astype(np.int32 if n < 2**31 else np.int64)
    generator = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(0 if rng is None else rng)
    blocks = np.array_split(generator.permutation(present), _block_count(len(present), epsilon))
    block_of = np.empty(n, np.int32)
    for number, members in enumerate(blocks):
        block_of[members] = number
    sums = np.zeros(n)
    for first in range(0, len(blocks), _TOGETHER):
        numbers = range(first, min(first + _TOGETHER, len(blocks)))
        made = {i: _of_block(_taken(rows, np.sort(blocks[i])), p) for i in numbers}  # without their keys

        def body(part: slice, made: Any = made) -> None:
            _add_blocks(rows, present[part], made, block_of, sums, p, epsilon)

        by_chunks(body, len(present), _ROWS)
        if not _undecided(sums[present], epsilon).any():
            break
    with np.errstate(divide="ignore"):
        return np.asarray(np.minimum((1 + 1e-6) / sums, 1.0))


def _add_blocks(
    rows: Rows,
    some: npt.NDArray[Any],
    made: dict[int, tuple[Factor, float]],
    block_of: npt.NDArray[np.int32],
    sums: Float64,
    p: float,
    epsilon: float,
) -> None:
    """Add the terms of some blocks to the sums of some keys, until the keys are decided."""
    undecided = some[_undecided(sums[some], epsilon)]
    left = _taken(rows, undecided)
    for number, (factor, constant) in made.items():
        if not len(undecided):
            break
        t = to_numpy(factor.on(left).scores(member=False)[0])[0]
        mine = (block_of[undecided] == number).astype(np.float32)
        shrink = (1 + 4 * float(factor.score_error[0])) ** (-p / 2) / constant  # 0 where the error is infinite
        each: Float64 = mine
        if shrink:
            with np.errstate(divide="ignore", over="ignore"):
                each = np.clip(shrink / (t if p == 2 else t.astype(np.float64) ** (p / 2)), mine, 1 + mine)
        sums[undecided] += each
        still = np.flatnonzero(_undecided(sums[undecided], epsilon))
        if len(still) < 0.8 * len(undecided):  # copying the rest costs less than continuing with all keys
            undecided = undecided[still]
            left = _taken(rows, undecided)


def _undecided(sums: Float64, epsilon: float) -> npt.NDArray[np.bool_]:
    return np.asarray(sums * epsilon <= 1 + 1e-6)


def _block_count(n: int, epsilon: float) -> int:
    """Return the number of blocks for n keys: none is empty, and they are few where no number decides a key.

    The terms of blocks of one key sum to at most n, and the terms of larger blocks to less. So for ε ≤ 1/n no bound
    falls below ε.
    """
    most = n if n * epsilon > 1 else min(n, _MOST_IN_VAIN)
    return max(1, math.ceil(min(2 / epsilon, most)))


def _of_block(members: Rows, p: float) -> tuple[Factor, float]:
    """Return a factor and a constant for which t ≤ constant (kᵀM⁺k)^{p/2}: see `lewis`.

    M has equal weights where rounded Lewis weights would change the row space.
    """
    factor = factor_moments(members, single="yes")
    if p == 2:
        return factor.forget_keys(), 1.0
    tau = raised_scores(factor)
    v, _, moved, _ = iterated(members, tau, factor.rank, p, _BLOCK_ITERATIONS)
    raised = float(moved[0])
    if math.isfinite(raised):
        factor = factor_moments(replace(members, weights=v), single="yes")
    else:
        v, raised = np.ones(v.shape), 1.0
    total = float(np.sum(v ** (2 * p / (p - 2)), where=tau > 0))
    return factor.forget_keys(), max(total, 1.0) ** (p / 2 - 1) * raised**p * (1 + 1e-9)


def _taken(rows: Rows, indices: npt.NDArray[Any]) -> Rows:
    """Return some rows of a batch of one, ascending and not masked; consecutive rows without a copy."""
    m = len(indices)
    if m and int(indices[-1]) - int(indices[0]) + 1 == m:
        return replace(rows, mask=None).between(int(indices[0]), int(indices[0]) + m)
    return replace(rows, keys=take_rows(rows.keys, indices), mask=None)


# Bounds from the sum over every block of keys while one key has attention: the only bounds for general functions. For
# powers they take as long as all other bounds together.
BLOCK_BOUND = Certificate(
    "block",
    lambda f: not isinstance(f, Softmax) and not is_square(f),
    _of_each,
    lambda problem: not isinstance(problem.f, Power),
)
