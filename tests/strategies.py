"""Keys to test with: named fixed cases, storage types, and hypothesis strategies; functions beside the library's."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emulator import device

EXAMPLES = 16  # of a property in `make test`

Float = NDArray[np.float64]

HAS_TORCH = find_spec("torch") is not None
HAS_STRICT = find_spec("array_api_strict") is not None
HAS_JAX = find_spec("jax") is not None
HAS_ML_DTYPES = find_spec("ml_dtypes") is not None


# -- storage types and layouts -------------------------------------------------------


def _as_numpy(array: Any, name: str) -> Any:
    """Values of an array of any library, of a type of numpy or, in these libraries, of this name."""
    library = type(array).__module__.split(".")[0]
    if library == "torch":
        import torch

        return array.detach().to(getattr(torch, name)).cpu().numpy()
    if library == "array_api_strict":
        import array_api_strict as xp

        return np.array(np.from_dlpack(xp.astype(array, getattr(xp, name))))
    return array.get() if hasattr(array, "get") else array


def as_float64(array: Any) -> Float:
    """Values of any array as numpy float64, bfloat16 and strict arrays included."""
    return np.array(_as_numpy(array, "float64"), dtype=np.float64)


def as_bool(array: Any) -> NDArray[np.bool_]:
    """Boolean mask of any namespace as a numpy array."""
    return np.asarray(_as_numpy(array, "uint8")).astype(bool)


def numpy_array(dtype: str) -> Callable[[Float], Any]:
    def convert(values: Float) -> Any:
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401 (by which numpy knows the name)
        with np.errstate(over="ignore"):
            return values.astype(dtype)

    return convert


def torch_tensor(dtype: str, where: str = "cpu") -> Callable[[Float], Any]:
    def convert(values: Float) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype)).to(where)

    return convert


def strict_array(dtype: str) -> Callable[[Float], Any]:
    def convert(values: Float) -> Any:
        import array_api_strict as xp

        return xp.asarray(np.ascontiguousarray(values), dtype=getattr(xp, dtype))

    return convert


def jax_array(dtype: str) -> Callable[[Float], Any]:
    """JAX's, whose float64 is on in tests with it (conftest)."""

    def convert(values: Float) -> Any:
        import jax

        return jax.numpy.asarray(numpy_array(dtype)(values))

    return convert


def cupy_array(dtype: str) -> Callable[[Float], Any]:
    """CuPy's on a CUDA device, and where there is none arrays of the emulator, whose module the test sees as cupy."""

    def convert(values: Float) -> Any:
        import cupy

        with np.errstate(over="ignore"):
            return cupy.asarray(np.ascontiguousarray(values).astype(dtype))

    return convert


STORAGE: dict[str, Callable[[Float], Any]] = {
    t: numpy_array(t) for t in ("float64", "float32", "float16", *(["bfloat16"] if HAS_ML_DTYPES else []))
}
if HAS_TORCH:
    STORAGE |= {f"torch-{t}": torch_tensor(t) for t in ("float64", "float32", "float16", "bfloat16")}
if HAS_STRICT:
    STORAGE |= {f"strict-{t}": strict_array(t) for t in ("float64", "float32")}
if HAS_JAX:
    STORAGE |= {f"jax-{t}": jax_array(t) for t in ("float64", "float32", "float16", "bfloat16")}
if device.AVAILABLE:
    STORAGE |= {f"cupy-{t}": cupy_array(t) for t in ("float64", "float32", "float16")}
if device.DEVICES and HAS_TORCH:
    STORAGE |= {f"torch-cuda-{t}": torch_tensor(t, "cuda") for t in ("float64", "float32", "float16", "bfloat16")}


ALL_STORAGE = (
    *("float64", "float32", "float16", "bfloat16"),
    *("torch-float64", "torch-float32", "torch-float16", "torch-bfloat16"),
    *("strict-float64", "strict-float32"),
    *("jax-float64", "jax-float32", "jax-float16", "jax-bfloat16"),
    *("cupy-float64", "cupy-float32", "cupy-float16"),
)


def stores(*names: str) -> pytest.MarkDecorator:
    """Parametrisation by storage type; a type whose package is not installed is skipped."""
    return pytest.mark.parametrize(
        "storage",
        [
            pytest.param(name, marks=pytest.mark.skipif(name not in STORAGE, reason=f"no package for {name}"))
            for name in names or ALL_STORAGE
        ],
    )


def read_only(values: Any) -> Any:
    copy = np.array(values)
    copy.flags.writeable = False
    return copy


def sliced(values: Any) -> Any:
    """Every second row and the inner columns of a larger array of NaN."""
    rows, columns = values.shape[-2:]
    larger = np.full((*values.shape[:-2], 2 * rows + 1, columns + 3), np.nan, dtype=values.dtype)
    view = larger[..., 1::2, 2:-1]
    view[...] = values
    return view


def reversed_rows(values: Any) -> Any:
    """The same values behind negative strides."""
    return np.ascontiguousarray(values[..., ::-1, ::-1])[..., ::-1, ::-1]


def unaligned(values: Any) -> Any:
    """Values that start at an odd address."""
    buffer = bytearray(values.nbytes + 1)
    view = np.frombuffer(buffer, dtype=np.uint8, offset=1, count=values.nbytes)
    view[:] = np.frombuffer(np.ascontiguousarray(values).tobytes(), dtype=np.uint8)
    return np.frombuffer(buffer, dtype=values.dtype, offset=1, count=values.size).reshape(values.shape)


def memory_mapped(values: Any) -> Any:
    """A read-only map of an unnamed temporary file."""
    if values.size == 0:
        return values
    with tempfile.TemporaryFile() as file:
        file.write(np.ascontiguousarray(values).tobytes())
        file.flush()
        return np.memmap(file, dtype=values.dtype, mode="r", shape=values.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "read-only": read_only,
    "fortran": np.asfortranarray,
    "sliced": sliced,
    "reversed": reversed_rows,
    "unaligned": unaligned,
    "memmap": memory_mapped,
}


# -- named keys ----------------------------------------------------------------------


def conditioned(rng: np.random.Generator, n: int, d: int, kappa: float) -> Float:
    """U diag(s) Vᵀ with singular values spread evenly in the logarithm from 1 to 1/κ."""
    U = np.linalg.qr(rng.standard_normal((n, d)))[0]
    V = np.linalg.qr(rng.standard_normal((d, d)))[0]
    s = np.logspace(0, -np.log10(kappa), d) if d > 1 else np.ones(1)
    return np.asarray((U * s) @ V.T)


def tiny_direction(rng: np.random.Generator, n: int, d: int, size: float) -> Float:
    """One key alone in its direction, of length `size` times the other singular values.

    The direction is mixed into the last column by integers, so that no rounding of the other
    keys leaks into it; a rotation in floating point would leak 1e-16 of every key.
    """
    keys = np.rint(rng.standard_normal((n, d)) * 64)
    keys[:, -1] = 0
    j = n // 3
    keys[j] = 0
    keys[j, -1] = size * 64 * np.sqrt(n)
    keys[:, -1] += keys[:, :-1].sum(axis=1)
    return keys


def coherent(rng: np.random.Generator, n: int, d: int) -> Float:
    """Gaussian rows scaled by heavy-tailed (Cauchy) factors: a few rows carry everything."""
    return np.asarray(rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-3, 1e4))


def graded(rng: np.random.Generator, n: int, d: int, span: float = 1e-12) -> Float:
    """Columns whose scales fall from 1 to `span`."""
    return np.asarray(rng.standard_normal((n, d)) * np.logspace(0, np.log10(span), d))


def integer_deficient(rng: np.random.Generator, n: int, d: int, rank: int) -> Float:
    """Product of small integer factors: the rank is exact in every storage type."""
    return np.asarray((rng.integers(-2, 3, (n, rank)) @ rng.integers(-2, 3, (rank, d))).astype(np.float64))


def near_deficient(rng: np.random.Generator, n: int, d: int, gap: float) -> Float:
    """The last column is the sum of the others up to noise of relative size `gap`."""
    keys = rng.standard_normal((n, d))
    keys[:, -1] = keys[:, :-1].sum(axis=1) + gap * keys[:, -1]
    return keys


def identity_blocks(d: int, m: int) -> Float:
    """I_d ⊗ 1_m: every score is exactly 1/m."""
    return np.asarray(np.kron(np.eye(d), np.ones((m, 1))))


def planted(rng: np.random.Generator, n: int, d: int, strength: float = 6.0) -> Float:
    """d/4 keys along directions of their own amid stronger anisotropic background.

    The background rows are longer than the planted ones: row norms miss them.
    """
    count = max(d // 4, 1)
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
    background = basis[:, count : count + max(d // 2, 1)]
    keys = 0.05 * rng.standard_normal((n, d))
    keys += rng.standard_normal((n, background.shape[1])) @ background.T * 4
    rows = rng.choice(n, count, replace=False)
    keys[rows] = strength * basis[:, :count].T + 0.05 * rng.standard_normal((count, d))
    return keys


def _duplicated(rng: np.random.Generator) -> Float:
    return np.asarray(np.repeat(rng.standard_normal((30, 8)), rng.integers(1, 9, 30), axis=0))


def _zero_rows(rng: np.random.Generator) -> Float:
    keys = rng.standard_normal((90, 8))
    keys[::3] = 0
    return keys


def _scaled_rows(rng: np.random.Generator, small: float, large: float) -> Float:
    keys = rng.standard_normal((60, 8))
    keys[:3] *= large
    keys[3:30] *= small
    return keys


def _constant_columns(rng: np.random.Generator) -> Float:
    keys = rng.standard_normal((70, 8))
    keys[:, 2] = 3.0
    keys[:, 5] = -1.5
    return keys


CASES: dict[str, Callable[[np.random.Generator], Float]] = {
    "gaussian": lambda rng: rng.standard_normal((200, 16)),
    "gaussian-tall": lambda rng: rng.standard_normal((3000, 8)),
    "graded-1e-4": lambda rng: graded(rng, 120, 8, 1e-4),
    "graded-1e-30": lambda rng: graded(rng, 120, 8, 1e-30),
    "coherent": lambda rng: coherent(rng, 200, 8),
    "deficient-exact": lambda rng: integer_deficient(rng, 80, 8, 5),
    "deficient-rank-1": lambda rng: integer_deficient(rng, 40, 8, 1),
    "near-deficient-1e-3": lambda rng: near_deficient(rng, 100, 8, 1e-3),
    "near-deficient-1e-6": lambda rng: near_deficient(rng, 100, 8, 1e-6),
    "near-deficient-1e-10": lambda rng: near_deficient(rng, 100, 8, 1e-10),
    "duplicated": _duplicated,
    "zero-rows": _zero_rows,
    "all-zero": lambda _: np.zeros((20, 4)),
    "long-rows": lambda rng: _scaled_rows(rng, 1.0, 2.0**10),
    "huge-rows": lambda rng: _scaled_rows(rng, 1.0, 1e9),
    "tiny-rows": lambda rng: _scaled_rows(rng, 1e-9, 1.0),
    "scale-1e15": lambda rng: rng.standard_normal((100, 8)) * 1e15,
    "scale-1e-15": lambda rng: rng.standard_normal((100, 8)) * 1e-15,
    "scale-1e150": lambda rng: rng.standard_normal((100, 8)) * 1e150,
    "scale-1e-150": lambda rng: rng.standard_normal((100, 8)) * 1e-150,
    "wide": lambda rng: rng.standard_normal((5, 16)),
    "square": lambda rng: rng.standard_normal((16, 16)),
    "one-more-row": lambda rng: rng.standard_normal((17, 16)),
    "no-row": lambda _: np.zeros((0, 8)),
    "one-row": lambda rng: rng.standard_normal((1, 8)),
    "one-zero-row": lambda _: np.zeros((1, 8)),
    "one-column": lambda rng: rng.standard_normal((50, 1)),
    "one-number": lambda _: np.ones((1, 1)),
    "conditioned-1e2": lambda rng: conditioned(rng, 200, 16, 1e2),
    "conditioned-1e4": lambda rng: conditioned(rng, 200, 16, 1e4),
    "conditioned-1e6": lambda rng: conditioned(rng, 200, 16, 1e6),
    "conditioned-1e10": lambda rng: conditioned(rng, 200, 16, 1e10),
    "identity-blocks": lambda _: identity_blocks(8, 5),
    "planted": lambda rng: planted(rng, 600, 16),
    "constant-columns": _constant_columns,
    "large-mean": lambda rng: rng.standard_normal((100, 8)) + 1e3,
    "tiny-direction-1e-3": lambda rng: tiny_direction(rng, 300, 8, 1e-3),
    "tiny-direction-1e-9": lambda rng: tiny_direction(rng, 300, 8, 1e-9),
}


@cache
def case(name: str) -> Float:
    """Keys of a named case in float64, read-only; the seed is the name."""
    keys = np.array(CASES[name](np.random.default_rng(zlib.crc32(name.encode()))), dtype=np.float64)
    keys.flags.writeable = False
    return keys


def stored_case(name: str, storage: str) -> tuple[Any, Float] | None:
    """Keys of a case in a storage type, and their stored values; None where they overflow."""
    array = STORAGE[storage](case(name))
    values = as_float64(array)
    return (array, values) if np.all(np.isfinite(values)) else None


# -- hypothesis ----------------------------------------------------------------------


def examples(count: int) -> settings:
    """Settings with `count` examples in `make test`, and more in the thorough tier; a search has the profile's own."""
    profile = settings()
    return settings(max_examples=count * profile.max_examples // EXAMPLES) if profile.derandomize else profile


def trials(count: int) -> int:
    """How often to try what is tried `count` times in the thorough tier: an eighth of that in `make test`."""
    return max(1, count // 8) if settings().max_examples == EXAMPLES else count


def more(values: Iterable[Any]) -> list[Any]:
    """Parameters that are left to the thorough tier."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


@st.composite
def integer_keys(
    draw: st.DrawFn,
    *,
    columns: tuple[int, ...] = (1, 3, 8),
    min_rows: int = 0,
    max_rows: int = 24,
    bound: int = 4,
) -> Float:
    """Small integers, exact in every storage type; deficient ranks and duplicates are common."""
    d = draw(st.sampled_from(columns))
    n = draw(st.integers(min_rows, max_rows))
    rank = draw(st.integers(0, d))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if rank == d:
        keys = rng.integers(-bound, bound + 1, (n, d))
    else:
        keys = rng.integers(-2, 3, (n, rank)) @ rng.integers(-1, 2, (rank, d))
    if n > 0 and draw(st.booleans()):
        keys = keys[rng.integers(0, n, n)]
    return keys.astype(np.float64)


@st.composite
def invertible(draw: st.DrawFn, d: int) -> Float:
    """Integer matrices of determinant ±1 with small entries."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lower = np.tril(rng.integers(-1, 2, (d, d)), -1) + np.eye(d)
    return np.asarray(lower[rng.permutation(d)] * rng.choice([-1.0, 1.0], d))


@st.composite
def real_keys(draw: st.DrawFn, *, columns: tuple[int, ...] = (1, 3, 8), max_rows: int = 24) -> Float:
    """Gaussian keys with rows and columns scaled over many magnitudes."""
    d = draw(st.sampled_from(columns))
    n = draw(st.integers(1, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row_span = draw(st.sampled_from([0, 2, 6]))
    column_span = draw(st.sampled_from([0, 2, 6]))
    keys = rng.standard_normal((n, d))
    keys *= 10.0 ** rng.uniform(-row_span, row_span, (n, 1))
    return np.asarray(keys * 10.0 ** rng.uniform(-column_span, column_span, d))


def epsilons() -> st.SearchStrategy[float]:
    return st.sampled_from([1.0, 0.7, 0.5, 1 / 3, 0.25, 0.1, 1 / 7, 0.05, 0.01, 1e-6])


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**32 - 1)


# -- sparse keys ---------------------------------------------------------------------


def csr(values: Any, dtype: Any = None) -> Any:
    """The entries that are not zero, as a scipy CSR array."""
    from scipy.sparse import csr_array

    return csr_array(values if dtype is None else values.astype(dtype))


def csr_with_duplicates(values: Float) -> Any:
    """Every entry in three parts, the columns of each row in falling order; exact for small integers."""
    from scipy.sparse import csr_array

    K = csr_array(values)
    indptr = K.indptr * 3
    rows = [slice(a, b) for a, b in zip(K.indptr[:-1], K.indptr[1:], strict=True)]
    indices = np.concatenate([np.tile(K.indices[r][::-1], 3) for r in rows] or [K.indices])
    data = np.concatenate([np.outer([1, 2, -2], K.data[r][::-1]).ravel() for r in rows] or [K.data])
    return csr_array((data, indices, indptr), shape=values.shape)


@st.composite
def spoilt(draw: st.DrawFn, most: int, columns: int) -> Float:
    """Heavy-tailed keys: graded, duplicated, rank-deficient, with zero rows; fewer rows than columns as well."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    n, d = draw(st.integers(1, most)), draw(st.integers(1, columns))
    K = rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-3, 1e3)
    if draw(st.booleans()):
        K = K * np.geomspace(1, 1e-5, d) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    if draw(st.booleans()):
        K = K[rng.integers(0, max(1, n // 3), n)]
    if draw(st.booleans()):
        K[:, -1] = K[:, 0]
    if draw(st.booleans()):
        K[rng.integers(0, n)] = 0
    return np.asarray(K)


@st.composite
def sparse_keys(draw: st.DrawFn, *, columns: tuple[int, ...] = (1, 3, 8, 20), max_rows: int = 40) -> Float:
    """Small integers, most of them zero: deficient ranks, empty rows and columns, copies and n < d are common."""
    d = draw(st.sampled_from(columns))
    n = draw(st.integers(0, max_rows))
    density = draw(st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys = rng.integers(-4, 5, (n, d)) * (rng.random((n, d)) < density)
    if n > 0 and draw(st.booleans()):
        keys = keys[rng.integers(0, n, n)]
    if draw(st.booleans()):
        keys = keys @ np.diag(rng.random(d) < 0.7)
    return keys.astype(np.float64)


# -- functions of one's own ----------------------------------------------------------


class Cauchy:
    growth, monotone = 2.0, True

    def __call__(self, x: Any) -> Any:
        return np.log1p(x * x)


class Floor:
    """A function with f(0) > 0, so that keys of zeros can have attention: the limit of growth p → 0 for small x."""

    growth, monotone = 2.0, True

    def __call__(self, x: Any) -> Any:
        return np.maximum(np.abs(x), 1.0)
