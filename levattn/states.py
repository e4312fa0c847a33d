"""Mergeable statistics of keys and values: an identity, ``update``, ``merge``, and a read-out.

Whatever runs on a state runs at once, in chunks and across machines without mathematics of its own.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._array import Matrices, as_mask, as_matrices, numbers, on_cuda, to_numpy
from levattn._bytes import as_damage, pack, shaped, unpack, whole
from levattn._kernels import BLOCK, Float64, Rows, latent_kernels_for
from levattn._kernels._mixture import State
from levattn._moments import Exponents, MomentSum, Twofold, refuse_nonfinite
from levattn._tail import Tail, present_rows, readable
from levattn.linalg import Factor, factor_moments, factor_sum

__all__ = ["Moments", "SoftmaxState", "factor_of", "factor_of_sum"]

_VERSION = 1


def factor_of(sums: MomentSum, tail: Rows, total: tuple[Twofold, Exponents] | None = None) -> Factor:
    """Return the factor of the keys of a sum and of the rows that wait, and forget these; `total` if it is known."""
    if sums.merged is None and not sums.blocks.count:
        return factor_moments(tail, single="scores").forget_keys()
    b, _, d = tail.shape
    return factor_of_sum(*(total or sums.total(tail)), Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format))


def factor_of_sum(moments: Twofold, exponents: Exponents, like: Rows) -> Factor:
    """Return the factor of moments whose columns were divided by powers of two, for keys as `like` has none of."""
    scale = np.ldexp(1.0, -exponents) if exponents.any() else None
    return factor_sum(moments, replace(like, mask=None, scale=scale))


class Moments:
    """The second moment ``G = Σ k kᵀ`` of keys that come in chunks, and the factor that leverage scores come from.

    The rows are numbered as they come and summed in fixed blocks, so that the result has the same bits whatever
    the sizes of the chunks and the number of threads. Merging two states agrees with one state to rounding.

    Sums are in float64 while that holds what the scores of the keys need, and else as pairs of float64, of about 100
    bits; this is decided block by block. So keys may be ill-conditioned, of any size, or rank-deficient.

    Parameters
    ----------
    d : int
        Number of columns of the keys.
    batch : tuple of int
        Leading axes (batch, heads) of the keys.

    Attributes
    ----------
    count : array of int64, shape (...,)
        Number of keys so far, masked ones not among them.

    Notes
    -----
    Time O(n d²), for ill-conditioned keys about ten times that of well-conditioned ones; memory O(d² log n) for the
    sums and at most 2048 rows that wait for their block to fill.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.states import Moments
    >>> K = np.arange(12.0).reshape(6, 2)
    >>> G = Moments(2).update(K[:5]).update(K[5:]).read()
    >>> np.array_equal(G, K.T @ K)
    True
    """

    def __init__(self, d: int, batch: tuple[int, ...] = ()) -> None:
        self.d = d
        self.batch = tuple(batch)
        self.count: npt.NDArray[np.int64] = np.zeros(self.batch, np.int64)
        self._sum = MomentSum(math.prod(self.batch), d)
        self._tail: Tail | None = None

    def update(self, K: Any, mask: Any = None) -> Moments:
        """Add a chunk of keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys, m ≥ 0 of them for each matrix of the batch, of the same dtype in all chunks.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part.

        Returns
        -------
        Moments
            The state itself.

        Raises
        ------
        TypeError
            If the dtype is another than that of the chunks before.
        ValueError
            If the batch or the number of columns differs from the state's.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. The first such rows are named by their number in the
            stream, counted from the first row that this state was given. The state is as it was.
        """
        matrices, rows = readable(K, mask)
        self.add(matrices, rows)
        return self

    def add(self, matrices: Matrices, rows: Rows) -> None:
        """Add a chunk that is checked and where compiled code can read it; see `update`."""
        if matrices.d != self.d or matrices.batch != self.batch:
            raise ValueError(
                f"K has batch {matrices.batch} and d = {matrices.d}; this state was made for batch {self.batch} "
                f"and d = {self.d}"
            )
        tail = self._tail.copy() if self._tail is not None else Tail(rows.shape[0], self.d, matrices.format)
        sums, before = self._sum.copy(), self._sum.blocks.count * BLOCK + tail.count
        try:
            tail.push(rows, sums.add)
        except FloatingPointError:
            refuse_nonfinite(rows, before)
        self._tail, self._sum = tail, sums
        self.count = self.count + present_rows(rows).reshape(self.batch)

    def _total(self) -> tuple[Twofold, Exponents]:
        tail = self._tail or Tail(math.prod(self.batch), self.d, "float64")
        return self._sum.total(tail.rows)

    def read(self) -> Float64:
        """Return the second moment of all rows so far.

        Returns
        -------
        array of float64, shape (..., d, d)
            Symmetric, zero where there was no key. Infinite where the square of a column's norm is beyond float64.
        """
        moments, exponents = self._total()
        with np.errstate(over="ignore"):
            return moments.scaled(-exponents).high.reshape(*self.batch, self.d, self.d)

    def factor(self) -> Factor:
        """Return the factor of the second moment: scores of rows, exact normalisers, and witness queries.

        Returns
        -------
        levattn.linalg.Factor
            For all matrices of the batch, in order.
        """
        tail = self._tail or Tail(math.prod(self.batch), self.d, "float64")
        return factor_of(self._sum, tail.rows)

    def merge(self, other: Moments) -> Moments:
        """Add what another state has seen.

        Parameters
        ----------
        other : Moments
            A state of the same batch and number of columns. It is not changed.

        Returns
        -------
        Moments
            This state, which now stands for the rows of both.

        Raises
        ------
        TypeError, ValueError
            If the states were made for different shapes, or saw keys of different dtypes.
        """
        if not isinstance(other, Moments):
            raise TypeError(f"other is of type {type(other).__name__}; expected Moments")
        if other.d != self.d or other.batch != self.batch:
            raise ValueError(
                f"other has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d}"
            )
        if other._tail is not None:
            format = other._tail.rows.format
            if self._tail is None:
                self._tail = Tail(math.prod(self.batch), self.d, format)
            elif self._tail.rows.format != format:
                raise TypeError(f"other has keys of dtype {format}; expected {self._tail.rows.format}, as here")
        self._sum.merge(*other._total())
        self.count = self.count + other.count
        return self

    def __copy__(self) -> Moments:
        """Return a state of its own."""
        return copy.deepcopy(self)

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays from which `from_parts` makes the state again."""
        fields, arrays = self._sum.parts()
        arrays |= {"count": self.count}
        if self._tail is not None:
            arrays |= {"tail": self._tail.rows.keys}
        format = None if self._tail is None else self._tail.rows.format
        return fields | {"d": self.d, "batch": list(self.batch), "format": format}, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Moments:
        """Return the state that `parts` took apart, or raise ValueError, TypeError or LookupError."""
        d, batch = whole(fields["d"], 1), tuple(whole(size) for size in fields["batch"])
        b = math.prod(batch)
        shaped(arrays["exponents"], np.int32, (b, d))  # before room is made for what the fields claim
        self = cls(d, batch)
        self._sum = MomentSum.from_parts(fields, arrays, b, self.d)
        self.count = shaped(arrays["count"], np.int64, self.batch)
        if fields["format"] not in (None, "float64", "float32", "float16", "bfloat16"):
            raise ValueError(f"keys are of format {fields['format']!r}")
        if fields["format"] is not None:
            self._tail = Tail(b, self.d, fields["format"])
            self._tail.hold(arrays["tail"])
        return self

    def to_bytes(self) -> bytes:
        """Return the state as bytes, from which `from_bytes` makes it again, on any machine.

        Returns
        -------
        bytes
            A header in JSON, the sums, the rows that wait, and a checksum.
        """
        return pack("Moments", _VERSION, *self.parts())

    @classmethod
    def from_bytes(cls, data: bytes) -> Moments:
        """Return the state that `to_bytes` made bytes of.

        Parameters
        ----------
        data : bytes
            What `to_bytes` returned.

        Returns
        -------
        Moments
            It goes on exactly as the other would have.

        Raises
        ------
        TypeError
            If the data are no bytes.
        ValueError
            If they are damaged, of another kind, or of a version that is not known.
        """
        fields, arrays = unpack(data, "Moments", _VERSION)
        with as_damage():
            return cls.from_parts(fields, arrays)


class SoftmaxState:
    """Softmax averages of values over positions that come in chunks, one for each latent.

    Of logits K (positions × latents) and values V it holds ``m = max K``, ``s = Σ e^{K − m}`` and
    ``S = Σ e^{K − m} V``, the sums over positions, and reads ``S / s``: for each latent the mean of the values under
    the softmax of its logits. A latent is whatever has a softmax of its own over positions: a latent value of
    `levattn.attention.latte`, or a query, whose logits are its products with keys; then this is exact attention, split
    over parts of the keys.

    Merging is associative and commutative, and the state of a set of positions is the same for all ways to split it,
    to rounding. It is held in float64 whatever the logits and values are, so its error does not grow with their number
    (on the CPU, numbers of at most float32 are summed in float32 for 64 positions at a time).

    Parameters
    ----------
    latents : int
        Number of latents L.
    d : int
        Number of channels D of the values.
    batch : tuple of int
        Leading axes (batch, heads).

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number, or `latents` or `d` is below 1.

    Notes
    -----
    Time O(TLD) for T positions, memory L (D + 2) float64 numbers for each item of the batch. A latent that has seen no
    position, or only logits of −inf, reads zero. NaN spreads to what it touches.

    References
    ----------
    Milakov and Gimelshein, arXiv:1805.02867, section 3 (the merge). Dolga et al., arXiv:2402.17512 (latents).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.states import SoftmaxState
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 100, 8))
    >>> logits = K @ Q[:2].T  # of two queries
    >>> state = SoftmaxState(2, 8).update(logits[:60], V[:60])
    >>> state = state.merge(SoftmaxState(2, 8).update(logits[60:], V[60:]))
    >>> A = np.exp(logits) / np.exp(logits).sum(axis=0)
    >>> np.allclose(state.read(), A.T @ V)
    True
    """

    def __init__(self, latents: int, d: int, batch: tuple[int, ...] = ()) -> None:
        self.latents = _size("latents", latents, 1)
        self.d = _size("d", d, 1)
        if not isinstance(batch, tuple | list):
            raise TypeError(f"batch is {batch!r}; expected a tuple of sizes, such as (batch, heads)")
        self.batch = tuple(_size("batch", size, 0) for size in batch)
        self._held: State | None = None

    @property
    def m(self) -> Any:
        """The largest logit of each latent, (..., L); −inf where there is none."""
        return self._parts()[0]

    @property
    def s(self) -> Any:
        """The sums of exponentials relative to `m`, (..., L); 0 where there is none."""
        return self._parts()[1]

    @property
    def S(self) -> Any:  # noqa: N802
        """The sums of values times these exponentials, (..., L, D)."""
        return self._parts()[2]

    def _parts(self) -> State:
        if self._held is None:
            s = np.zeros((*self.batch, self.latents))
            return np.full_like(s, -np.inf), s, np.zeros((*s.shape, self.d))
        return self._held

    @classmethod
    def from_arrays(cls, m: Any, s: Any, S: Any) -> SoftmaxState:
        """Return the state that holds these arrays, without a copy; tensors of torch in main memory as numpy's.

        Parameters
        ----------
        m, s : array of float64, shape (..., L)
            As the attributes of the same name.
        S : array of float64, shape (..., L, D)
            Of the same kind.

        Returns
        -------
        SoftmaxState
            With the batch (...).

        Raises
        ------
        TypeError
            If an argument is no array of float64.
        ValueError
            If the shapes do not go together.
        """
        m, s, S = (_held_as(name, part) for name, part in (("m", m), ("s", s), ("S", S)))
        if S.ndim < 2 or tuple(m.shape) != tuple(S.shape[:-1]) or tuple(s.shape) != tuple(m.shape):
            raise ValueError(
                f"m, s and S have shapes {tuple(m.shape)}, {tuple(s.shape)} and {tuple(S.shape)}; expected (..., L), "
                "(..., L) and (..., L, D)"
            )
        *batch, latents, d = S.shape
        self = cls(int(latents), int(d), tuple(map(int, batch)))
        self._held = (m, s, S)
        return self

    def update(self, logits: Any, V: Any, mask: Any = None) -> SoftmaxState:
        """Add a chunk of positions.

        Parameters
        ----------
        logits : array of shape (..., T, L)
            The logit of each position for each latent, T ≥ 0 of them; −inf for a position that a latent does not see.
        V : array of shape (..., T, D)
            Values. Both are of any kind that `levattn.leverage_scores` takes, of one library and device; the state
            holds arrays of the same, and numpy's for torch in main memory.
        mask : array of bool, shape (..., T), optional
            True for a position that takes part.

        Returns
        -------
        SoftmaxState
            The state itself.

        Raises
        ------
        TypeError
            If an argument is no array of floats, or of another library or device than the state.
        ValueError
            If a shape does not go with the state's.
        """
        K, values = as_matrices(logits, "logits"), as_matrices(V, "V")
        if (K.batch, K.d) != (self.batch, self.latents) or (values.batch, values.d) != (self.batch, self.d):
            raise ValueError(
                f"logits and V have shapes {(*K.batch, K.n, K.d)} and {(*values.batch, values.n, values.d)}; expected "
                f"{(*self.batch, 'T', self.latents)} and {(*self.batch, 'T', self.d)} in this state"
            )
        if values.n != K.n:
            raise ValueError(f"V has {values.n} positions and logits have {K.n}; expected as many")
        present = as_mask(mask, K)
        double = "float64" in (K.format, values.format)
        wide = (_as_computed(array, double) for array in (K, values))
        parts = latent_kernels_for(K.data).summary(*wide, present, np.array([0, K.n]))
        xp = array_api_compat.array_namespace(parts[2])
        m, s, S = (xp.reshape(part, (*self.batch, *part.shape[2:])) for part in parts)
        return self._join((m, s, S))

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Add what another state has seen.

        Parameters
        ----------
        other : SoftmaxState
            A state of the same batch and sizes. It is not changed.

        Returns
        -------
        SoftmaxState
            This state, which now stands for the positions of both.

        Raises
        ------
        TypeError, ValueError
            If the states were made for different shapes, or their arrays are of different libraries.
        """
        if not isinstance(other, SoftmaxState):
            raise TypeError(f"other is of type {type(other).__name__}; expected SoftmaxState")
        mine, theirs = (self.batch, self.latents, self.d), (other.batch, other.latents, other.d)
        if mine != theirs:
            raise ValueError(f"other has (batch, latents, d) = {theirs}; expected {mine}, as here")
        return self if other._held is None else self._join(other._held)

    def _join(self, other: State) -> SoftmaxState:
        if self._held is None:
            self._held = other
            return self
        xp = array_api_compat.array_namespace(other[2])
        if array_api_compat.array_namespace(self._held[2]) is not xp:
            raise TypeError(
                f"this state holds arrays of {type(self._held[2]).__module__} and was given those of {xp.__name__}; "
                "expected one library. Keep a state for each, and merge them by their bytes"
            )
        self._held = latent_kernels_for(other[2]).joined(self._held, other)
        return self

    def read(self) -> Any:
        """Return the mean of the values under the softmax of each latent.

        Returns
        -------
        array of float64, shape (..., L, D)
            Zero for a latent that has seen nothing.
        """
        _, s, S = self._parts()
        xp = array_api_compat.array_namespace(S)
        return S / xp.where(s == 0, xp.ones_like(s), s)[..., None]

    def copy(self) -> SoftmaxState:
        """Return a state of its own.

        Returns
        -------
        SoftmaxState
        """
        other = SoftmaxState(self.latents, self.d, self.batch)
        other._held = self._held  # arrays are never written to
        return other

    def to_bytes(self) -> bytes:
        """Return the state as bytes, from which `from_bytes` makes it again, on any machine.

        Returns
        -------
        bytes
            A header in JSON, the arrays, and a checksum.
        """
        fields: dict[str, Any] = {"latents": self.latents, "d": self.d, "batch": list(self.batch)}
        fields["empty"] = self._held is None
        held = {} if self._held is None else dict(zip("msS", map(to_numpy, self._held), strict=True))
        return pack("SoftmaxState", _VERSION, fields, held)

    @classmethod
    def from_bytes(cls, data: bytes) -> SoftmaxState:
        """Return the state that `to_bytes` made bytes of, with arrays of numpy.

        Parameters
        ----------
        data : bytes
            What `to_bytes` returned.

        Returns
        -------
        SoftmaxState
            With arrays of numpy.

        Raises
        ------
        TypeError
            If the data are no bytes.
        ValueError
            If they are damaged, of another kind, or of a version that is not known.
        """
        fields, arrays = unpack(data, "SoftmaxState", _VERSION)
        with as_damage():
            latents, d = whole(fields["latents"], 1), whole(fields["d"], 1)
            batch = tuple(whole(size) for size in fields["batch"])
            self = cls(latents, d, batch)
            shapes = {"m": (*batch, latents), "s": (*batch, latents), "S": (*batch, latents, d)}
            if (fields["empty"], set(arrays)) not in ((True, set()), (False, set(shapes))):
                raise ValueError(f"it holds the arrays {sorted(arrays)}")
            if arrays:
                m, s, S = (shaped(arrays[name], np.float64, shape, finite=False) for name, shape in shapes.items())
                self._held = m, s, S
            return self


def _size(name: str, value: Any, least: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = least - 1
    if isinstance(value, bool) or size < least:
        raise (ValueError if isinstance(value, int) else TypeError)(
            f"{name} is {value!r}; expected a whole number of at least {least}"
        )
    return size


def _held_as(name: str, array: Any) -> Any:
    """Return an array of float64 as a state holds it, or raise."""
    if array_api_compat.is_torch_array(array) and array.device.type == "cpu":
        array = array.detach().numpy()
    if not array_api_compat.is_array_api_obj(array) or str(array.dtype).rpartition(".")[2] != "float64":
        kind = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} is of {kind}; expected an array of float64, as the attributes of a state are")
    return array


def _as_computed(matrices: Matrices, double: bool) -> Any:
    """Return the numbers of matrices as float64 or float32."""
    data = matrices.data
    kind = "float64" if double else "float32"
    if isinstance(data, np.ndarray) or on_cuda(data):
        return numbers(data, matrices.format).astype(kind, copy=False)
    xp = array_api_compat.array_namespace(data)
    return xp.astype(data, getattr(xp, kind), copy=False)
