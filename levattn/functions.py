"""Attention functions f, whose scores are ``f(⟨q, k⟩) / Σ f(⟨q, k_l⟩)``, and their growth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from levattn._core.blas import lapack
from levattn._core.checks import positive_number
from levattn._core.types import Flags, Float64

INSIDE = 1e-12  # by which queries may be larger than the radius, relative to it
_ALIKE = 1e-12  # relative error of the entries up to which a matrix counts as symmetric, and positive semi-definite


@runtime_checkable
class AttentionFunction(Protocol):
    """A user-defined attention function.

    f must be even, finite, not negative, not constantly zero, not decreasing in abs(x), and of growth p:
    ``f(x) ≤ |x/y|^p f(y)`` for ``|x| ≥ |y| > 0``. For these functions, and no others, there is a certificate that
    needs nothing else of f. Each use of f checks these conditions on a grid, which finds most mistakes but proves
    nothing.

    Attributes
    ----------
    growth : float
        The exponent p > 0.
    monotone : bool
        True if f does not decrease in abs(x). Other functions are refused.
    scale : float, optional
        The number c, if f divides x by c and multiplies the value by c², as `Tukey` and `Fair` do. Values below c²
        times the least positive float64 vanish, and `heavy_attention` misses none of their keys if it knows c.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> class Cauchy:
    ...     growth, monotone = 2.0, True
    ...
    ...     def __call__(self, x):
    ...         return np.log1p(x * x)
    >>> K = np.random.default_rng(0).standard_normal((2000, 2))
    >>> len(levattn.universal_set(K, 0.1, f=Cauchy()))
    0
    """

    @property
    def growth(self) -> float:
        """The exponent p."""

    @property
    def monotone(self) -> bool:
        """Whether f does not decrease in abs(x)."""

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate f at every entry of an array of float64."""


def _with_square(name: str, value: Any) -> float:
    """Return a positive number whose square does not overflow."""
    number = positive_number(name, value)
    if number > 1e150:
        raise ValueError(
            f"{name} is {value!r}, whose square overflows; expected at most 1e150. Scale it and the queries"
        )
    return number


@dataclass(frozen=True)
class Power:
    """The power f(x) = abs(x)^p, for any p > 0.

    Parameters
    ----------
    p : float
        The exponent. p = 2 has exact universal sets at the cost of leverage scores.

    Raises
    ------
    TypeError, ValueError
        If `p` is not a finite number above 0.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), for attention with abs(x)^p.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.Power(3)(np.array([-2.0, 1.0]))
    array([8., 1.])
    """

    p: float
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the exponent."""
        object.__setattr__(self, "p", positive_number("p", self.p))

    @property
    def growth(self) -> float:
        """The exponent p."""
        return self.p

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate f at every entry of an array."""
        return np.asarray(x * x if self.p == 2 else np.abs(x) ** self.p)


class _Quadratic:
    """A function of at most quadratic growth."""

    growth: ClassVar[float] = 2.0
    monotone: ClassVar[bool] = True


class _Scaled(_Quadratic):
    """A quadratic function that divides its argument by c and multiplies the value by c²."""

    c: float

    def __post_init__(self) -> None:
        """Check the parameter, whose square must not overflow."""
        object.__setattr__(self, "c", _with_square("c", self.c))

    @property
    def scale(self) -> float:
        """The parameter c."""
        return self.c


@dataclass(frozen=True)
class Huber(_Quadratic):
    """Huber's function: x²/2 up to abs(x) = delta, and from there the tangent delta (abs(x) − delta/2).

    Parameters
    ----------
    delta : float, default 1
        The point where f becomes linear; of the size of ⟨q, k⟩.

    Raises
    ------
    TypeError, ValueError
        If `delta` is not a finite number above 0.

    References
    ----------
    Huber, Robust estimation of a location parameter, Annals of Mathematical Statistics 35, 1964.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.Huber(1.0)(np.array([-1.0, 3.0]))
    array([0.5, 2.5])
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        """Check the parameter."""
        object.__setattr__(self, "delta", positive_number("delta", self.delta))

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate f at every entry of an array."""
        size = np.abs(x)
        near = np.minimum(size, self.delta)
        return np.asarray(near * (size - near / 2))


@dataclass(frozen=True)
class Tukey(_Scaled):
    """Tukey's biweight: (c²/6)(1 − (1 − (x/c)²)³) up to abs(x) = c, and constant from there.

    Parameters
    ----------
    c : float, default 4.685
        The point where f becomes constant; of the size of ⟨q, k⟩.

    Raises
    ------
    TypeError, ValueError
        If `c` is not a number above 0 and at most 1e150.

    References
    ----------
    Beaton and Tukey, The fitting of power series, meaning polynomials, illustrated on band-spectroscopic data,
    Technometrics 16, 1974.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.Tukey(6.0)(np.array([6.0, 100.0]))
    array([6., 6.])
    """

    c: float = 4.685

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate f at every entry of an array."""
        u = (np.minimum(np.abs(x), self.c) / self.c) ** 2
        return np.asarray(self.c**2 / 6 * (u * (3 - u * (3 - u))))  # without the cancellation of 1 − (1 − u)³


@dataclass(frozen=True)
class L1L2(_Quadratic):
    """The function 2 (√(1 + x²/2) − 1): quadratic near 0, linear far off.

    References
    ----------
    Zhang, Parameter estimation techniques: a tutorial with application to conic fitting, Image and Vision Computing
    15, 1997.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.L1L2()(np.array([4.0]))
    array([4.])
    """

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate f at every entry of an array."""
        root = np.hypot(1.0, x / math.sqrt(2))
        return np.asarray(np.abs(x) * (np.abs(x) / (root + 1)))


@dataclass(frozen=True)
class Fair(_Scaled):
    """The Fair function: c² (u − log(1 + u)) with u = abs(x)/c.

    Parameters
    ----------
    c : float, default 1.4
        The point where f turns from quadratic to linear; of the size of ⟨q, k⟩.

    Raises
    ------
    TypeError, ValueError
        If `c` is not a number above 0 and at most 1e150.

    References
    ----------
    Fair, On the robust estimation of econometric models, Annals of Economic and Social Measurement 3, 1974.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.Fair(1.0)(np.array([0.0, 1.0])).round(4)
    array([0.    , 0.3069])
    """

    c: float = 1.4

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate f at every entry of an array."""
        size = np.abs(x)
        u = np.minimum(size, 1e300 * self.c) / self.c if self.c < 1 else size / self.c
        near = np.minimum(u, 1e-3)
        series = near * near * (1 / 2 - near * (1 / 3 - near * (1 / 4 - near * (1 / 5 - near / 6))))
        if self.c < 1:  # its square may vanish, and u is cut where it would be infinite
            return np.asarray(self.c * np.where(u < 1e-3, self.c * series, size - self.c * np.log1p(u)))
        return np.asarray(self.c**2 * np.where(u < 1e-3, series, u - np.log1p(u)))


@dataclass(frozen=True, eq=False)
class Softmax:
    r"""The exponential function of softmax attention, for queries of bounded size.

    For unbounded queries softmax has no small universal set: every extreme point of the keys would be in it. It may
    have one for :math:`\|q\| \le` `radius`, or for :math:`q^T \Sigma^{-1} q \le` `radius`\ ² with a given Σ. For
    queries like given ones, `expected_scores` and `covering_set` need no radius.

    Parameters
    ----------
    radius : float, default infinity
        Largest norm of a query, including the scale of the logits (1/√d). Certified bounds need a finite radius.
    matrix : array of shape (d, d), optional
        Σ, symmetric and positive semi-definite: queries lie in an ellipsoid of its shape. Default: the identity.

    Raises
    ------
    TypeError, ValueError
        If the radius is not a number above 0, or is infinite beside a Σ. Also if Σ is not symmetric and positive
        semi-definite.

    Notes
    -----
    exp is neither even nor of polynomial growth, so no certificate of the other functions covers it.

    References
    ----------
    The bounds for softmax are ours: docs/design.md, from Jensen's inequality.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.Softmax(3.0)(np.array([0.0, 1.0])).round(4)
    array([1.    , 2.7183])
    """

    radius: float = math.inf
    matrix: Float64 | None = field(default=None)
    _parts: tuple[Float64, Float64, Float64] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the parameters."""
        unbounded = self.matrix is None and self.radius == math.inf
        object.__setattr__(self, "radius", math.inf if unbounded else positive_number("radius", self.radius))
        if self.matrix is None:
            return
        given = np.asarray(self.matrix)
        if given.dtype.kind not in "fiu" or given.ndim != 2 or given.shape[0] != given.shape[1]:
            raise ValueError(f"matrix has shape {given.shape} and dtype {given.dtype}; expected real numbers (d, d)")
        matrix = given.astype(np.float64)
        size = np.abs(matrix).max(initial=0.0)
        if not np.isfinite(size) or np.abs(matrix - matrix.T).max(initial=0.0) > _ALIKE * size:
            raise ValueError("matrix is not symmetric or not finite; expected Σ of the queries' ellipsoid")
        even = matrix / 2 + matrix.T / 2
        axes = _axes(even)
        if axes is None:  # perhaps by rounding relative to the largest entry, which is then allowed for
            noise = _ALIKE * size * len(matrix)
            axes = _axes(even + 2 * noise * np.eye(len(even))) if np.linalg.eigvalsh(even)[0] >= -noise else None
        if axes is None:
            raise ValueError("matrix has a negative eigenvalue; expected a positive semi-definite Σ")
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "_parts", axes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Softmax):
            return NotImplemented
        same = (self.matrix is None) == (other.matrix is None)
        return same and self.radius == other.radius and np.array_equal(self.matrix, other.matrix)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash((Softmax, self.radius))

    def require_radius(self) -> None:
        """Raise if queries may be of any size.

        Raises
        ------
        ValueError
            If the radius is infinite.
        """
        if self.radius == math.inf:
            raise ValueError(
                "f is Softmax() without a radius, for which any extreme key can get all the attention. Give a "
                "radius, Softmax(r), or a sample of the queries to come, queries="
            )

    def root(self, d: int, *, within: bool = False) -> Float64:
        """Return a matrix L with ``L Lᵀ = radius² Σ``: queries are L times a vector of norm at most 1.

        L enlarges Σ by about d 2⁻⁵¹ of its diagonal, so that rounding leaves out no query.

        Parameters
        ----------
        d : int
            Number of columns of the keys.
        within : bool, default False
            Let L lessen Σ by as much, so that rounding admits no further query.

        Returns
        -------
        array of float64, shape (d, d)
            Scaled eigenvectors of Σ with unit diagonal; without Σ the identity, times the radius.

        Raises
        ------
        ValueError
            If Σ has another number of rows, or the radius is infinite.
        """
        self.require_radius()
        if self._parts is None:
            return self.radius * np.eye(d)
        self._check(d)
        sizes, values, vectors = self._parts
        if within:
            values = np.maximum(values - 2 * _enlargement(values), 0.0)
        return np.asarray(self.radius * sizes[:, None] * vectors * np.sqrt(values))

    def contains(self, Q: Float64, /) -> Flags:
        """Tell which queries lie within the radius.

        Parameters
        ----------
        Q : array of float64, shape (m, d)
            Queries.

        Returns
        -------
        array of bool, shape (m,)
            True within the radius, up to 1e-12 of it. Certificates allow for that excess.

        Raises
        ------
        ValueError
            If Σ has another number of rows than the queries have columns.
        """
        Q = np.asarray(Q, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            inside: Float64 = Q / self.radius
            if self._parts is not None:
                self._check(Q.shape[1])
                sizes, values, vectors = self._parts
                inside = np.where(
                    sizes > 0, inside / np.where(sizes > 0, sizes, 1.0), np.where(inside == 0, 0, np.inf)
                )
                inside = (inside @ vectors) / np.sqrt(np.where(values > 0, values, 1.0))  # they are 0 for Σ = 0
            return np.asarray(np.linalg.norm(inside, axis=1) <= 1 + INSIDE)

    def _check(self, d: int) -> None:
        if self.matrix is not None and len(self.matrix) != d:
            raise ValueError(f"f has a matrix of {len(self.matrix)} rows, but the keys have d = {d} columns")

    def __call__(self, x: Float64, /) -> Float64:
        """Evaluate exp at every entry of an array."""
        return np.exp(x)


def _axes(matrix: Float64) -> tuple[Float64, Float64, Float64] | None:
    """Return the roots of the diagonal and the eigenpairs of the scaled matrix; None if an eigenvalue is negative.

    The scaling makes the error of every row and column relative to its own size.
    """
    diagonal = np.diag(matrix)
    sizes = np.sqrt(np.maximum(diagonal, 0.0))
    c = np.where(sizes > 0, sizes, 1.0)
    with np.errstate(over="ignore"):
        even = matrix / c[:, None] / c
    if diagonal.min(initial=0.0) < 0 or (even[sizes == 0] != 0).any() or not np.abs(even).max(initial=0.0) < 2:
        return None
    values, vectors = lapack(np.linalg.eigh, even)
    if values.min(initial=0.0) < -_ALIKE * len(matrix):
        return None
    return sizes, np.maximum(values, 0.0) + _enlargement(values), vectors


def _enlargement(values: Float64) -> float:
    """Return a bound of the rounding of these eigenvalues."""
    return float(4 * len(values) * 2.0**-53 * values.max(initial=0.0))


_GRID = np.geomspace(1e-6, 1e6, 193)


# The names by which saved states and the program know them
FAMILIES: dict[str, type[Any]] = {family.__name__: family for family in (Power, Huber, Tukey, L1L2, Fair)}


def is_square(f: Any) -> bool:
    """Tell whether f is x², whose sensitivities are leverage scores."""
    return isinstance(f, Power) and f.p == 2


def scale_of(f: AttentionFunction) -> float:
    """Return the number by which f divides its argument; 1 if f has no scale."""
    return float(getattr(f, "scale", 1.0))


NAMES = "a number p for |x|^p, huber[:delta], tukey[:c], l1l2, fair[:c] or softmax[:radius]"
_BY_NAME: dict[str, Callable[..., Any]] = {
    **{name.lower(): family for name, family in FAMILIES.items() if name != "Power"},
    "softmax": Softmax,
}


def function_named(text: str) -> AttentionFunction | Softmax:
    """Return the function that a text such as "huber:0.5" names; a number p is |x|^p."""
    name, colon, parameter = text.partition(":")
    family = _BY_NAME.get(name)
    if family is None:
        return Power(_number_in(text, "there is no such function"))
    if colon and family is L1L2:
        raise ValueError("l1l2 takes no number")
    function = family(*([_number_in(parameter, f"{parameter!r} is not a number")] if colon else []))
    return cast(AttentionFunction | Softmax, function)


def _number_in(text: str, otherwise: str) -> float:
    """Return the number that a text is; if it is none, raise an error that says `otherwise`."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(otherwise) from None
    return positive_number("the number", number)


def as_function(f: Any) -> AttentionFunction | Softmax:
    """Return f, or the function that a number or a name stands for; raise if the theory does not admit it."""
    if isinstance(f, str):
        try:
            return function_named(f)
        except ValueError as error:
            raise ValueError(f"f is {f!r}: {error}. Expected {NAMES}") from None
    if isinstance(f, type):
        raise TypeError(f"f is the class {f.__name__}; expected one of its functions, such as {f.__name__}()")
    if isinstance(f, (*FAMILIES.values(), Softmax)):
        return cast(AttentionFunction | Softmax, f)
    if isinstance(f, int | float | np.integer | np.floating) and not isinstance(f, bool):
        return Power(positive_number("f", f))
    if not isinstance(f, AttentionFunction):
        raise TypeError(
            f"f is {f!r}; expected an exponent, one of levattn's functions, or a callable object with the attributes "
            "growth and monotone (see AttentionFunction)"
        )
    growth = positive_number("f.growth", f.growth)
    _with_square("f.scale", getattr(f, "scale", 1.0))
    if not f.monotone:
        raise ValueError("f.monotone is not True; expected a function that does not decrease in |x|")
    with np.errstate(over="ignore", invalid="ignore"):
        values, mirrored = (np.asarray(f(x), np.float64) for x in (_GRID, -_GRID))
    if values.shape != _GRID.shape or not np.isfinite(values).all() or values.min() < 0 or not values.any():
        raise ValueError("f does not return a finite number of at least 0 for each entry, or is constantly 0")
    if float(np.asarray(f(np.zeros(1)), np.float64)[0]) > values[0]:
        raise ValueError("f(0) is larger than f near 0; expected a function that does not decrease in |x|")
    slack = 1 + 1e-9
    if np.any(np.abs(values - mirrored) > 1e-9 * values):
        raise ValueError("f is not even: f(-x) differs from f(x); expected an even function")
    if np.any(values[:-1] > values[1:] * slack):
        raise ValueError("f decreases in |x| somewhere between 1e-6 and 1e6; expected a non-decreasing function")
    ratio = (_GRID[1:] / _GRID[:-1]) ** growth
    if np.any(values[1:] > values[:-1] * ratio * slack):
        raise ValueError(
            f"f grows faster than |x|^{growth:g} somewhere between 1e-6 and 1e6. With p = f.growth, expected "
            "f(x) <= |x/y|^p f(y) for |x| >= |y| > 0. Give a larger growth"
        )
    return f
