"""Docstrings of the public names: form by numpydoc, and shapes, errors, cost and source by rules of our own.

The names are read from the source, so that every environment has the same tests; a module whose package is not
installed is skipped. Each rule yields what is wrong as text, and is itself tested on a docstring with a planted fault.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpydoc")

from numpydoc import docscrape, validate

import levattn

ROOT = Path(levattn.__file__).parent
REFERENCE = ROOT.parent / "docs" / "reference"

# levattn.io has its public names at the top; the program, levattn.cli, has a page of its own.
MODULES = (
    "levattn",
    "levattn.attention",
    "levattn.attention.rates",
    "levattn.datasets",
    "levattn.definitions",
    "levattn.distributed.dask",
    "levattn.distributed.torch",
    "levattn.integrations.kvpress",
    "levattn.integrations.sklearn",
    "levattn.integrations.timm",
    "levattn.integrations.transformers",
    "levattn.linalg",
    "levattn.nn",
    "levattn.plots",
    "levattn.sketch",
    "levattn.states",
)
# Packages that these need to be imported.
NEEDED = {
    "levattn.integrations.kvpress": ("torch", "transformers", "kvpress"),
    "levattn.integrations.sklearn": ("sklearn",),
    "levattn.integrations.timm": ("torch", "timm"),
    "levattn.integrations.transformers": ("torch", "transformers"),
    "levattn.nn": ("torch",),
}
# What these modules lend to others of the library, and not to users.
INTERNAL = {
    "levattn.states": {"factor_of", "factor_of_sum"},
}
OURS = re.compile(r"levattn\b(?!\._kernels)|" + __name__)  # modules whose functions are followed to their errors
NO_OBJECTS = {"levattn.__version__", "levattn.datasets"}  # a string, and a module whose names are among these

# Codes of numpydoc that are not asked for, and why.
UNASKED = {
    "ES01": "one line says what many names are",
    "EX01": "examples are asked of functions and classes, by `example_missing`, not of their members",
    "SA01": "See Also stands where there is something to see",
    "SS05": "summaries may be noun phrases: 'Rows of a sketch'",
}

# Errors that Raises need not tell: levattn is wrong, it catches them itself, or a package is not installed.
UNTOLD = (AssertionError, FloatingPointError, ImportError)
NOT_REACHED = {("levattn.KeySource.load", ValueError)}  # of an empty sequence of paths, which no source has

_MODELS = "levattn.integrations.transformers."
_SKETCH_SIZES = {f"levattn.sketch.{name}_size" for name in ("countsketch", "gaussian", "jl", "osnap", "sign", "srht")}
_FUNCTIONS = {f"levattn.{name}" for name in ("Power", "Huber", "Tukey", "L1L2", "Fair", "Softmax")}
# Looks up, sets or writes down what is there.
_BOOKKEEPING = {
    "levattn.integrations.timm.Pruning",
    "levattn.nn.set_dense",
    "levattn.thread_limit",
    "levattn.warmup",
    _MODELS + "Calibration",
    _MODELS + "HeadProfile",
    _MODELS + "latent_parameters",
    _MODELS + "latent_state_dict",
    _MODELS + "load_latent_state_dict",
    _MODELS + "register",
    _MODELS + "remove",
    _MODELS + "state_size",
}
# Notes need not tell a cost: a number by a formula, or a formula for each entry.
COSTLESS = _SKETCH_SIZES | _FUNCTIONS | _BOOKKEEPING
# References need not be: there is no theorem behind files, sums, made data and pictures of what is selected.
SOURCELESS = _BOOKKEEPING | {
    "levattn.datasets.planted",
    "levattn.distributed.dask.from_keys",
    "levattn.distributed.dask.query_moments",
    "levattn.integrations.timm.kept_patches",
    "levattn.open_keys",
    "levattn.sketch.Sketch",  # that of its distribution
    "levattn.sketch.SketchedRows",
    "levattn.states.Moments",
}


@dataclass(frozen=True)
class Name:
    """A public name, or a public member of a class, with what it stands for."""

    label: str
    value: Any
    owner: type | None = None  # of a member

    @property
    def function(self) -> types.FunctionType | None:
        """The function behind a function, method or property."""
        value = self.value
        for wrapped in ("fget", "func", "__func__"):  # of a property, a cached one, and a class or static method
            value = getattr(value, wrapped, value)
        value = inspect.unwrap(value) if callable(value) else value
        return value if inspect.isfunction(value) else None

    @functools.cached_property
    def doc(self) -> Any:
        """The sections of the docstring."""
        return docscrape.NumpyDocString(inspect.getdoc(self.value) or "")

    @property
    def is_holder(self) -> bool:
        """Whether it is a class that users do not make: a result or a cache, told by its attributes alone."""
        return isinstance(self.value, type) and bool(self.doc["Attributes"]) and not self.doc["Parameters"]

    @property
    def is_error(self) -> bool:
        return isinstance(self.value, type) and issubclass(self.value, BaseException)

    @property
    def computes(self) -> bool:
        """Whether a cost and a source are asked of it: not of members, holders, errors and pictures."""
        return not (self.owner or self.is_holder or self.is_error or self.label.startswith("levattn.plots."))


@functools.cache
def source_of(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))


def listed(module: str) -> list[str]:
    """The ``__all__`` of a module, from its source."""
    for node in source_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


def public_names() -> list[str]:
    names = [
        f"{module}.{name}" for module in MODULES for name in listed(module) if name not in INTERNAL.get(module, ())
    ]
    return sorted(set(names) - NO_OBJECTS)


def loaded(label: str) -> Name:
    module, _, name = label.rpartition(".")
    for package in NEEDED.get(module, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are imported here for the first time
        return Name(label, getattr(importlib.import_module(module), name))


def members(name: Name) -> Iterator[Name]:
    """The public methods and properties of a class that levattn defines."""
    if not isinstance(name.value, type):
        return
    for found in inspect.classify_class_attrs(name.value):
        member = Name(f"{name.label}.{found.name}", found.object, name.value)
        shown = OURS.match(found.defining_class.__module__) and not found.name.startswith("_")
        if shown and member.function and not refers_to_base(member):
            yield member


def refers_to_base(member: Name) -> bool:
    """Whether the docstring of an overriding method sends to that of a base class: "see `Base`."."""
    base = re.search(r"; see `(\w+)`\.$", inspect.getdoc(member.value) or "")
    name = member.label.rpartition(".")[2]
    return bool(base) and any(cls.__name__ == base[1] and name in vars(cls) for cls in member.owner.__mro__[1:])


def numpydoc_faults(name: Name) -> Iterator[str]:
    shown = getattr(name.owner, name.label.rpartition(".")[2]) if name.owner else name.value
    for code, message in validate.validate(docscrape.get_doc_object(shown))["errors"]:
        if code not in UNASKED and not (code == "PR01" and name.is_holder):  # then `undescribed_fields` asks for them
            yield f"{code} {message}"


def missing_annotations(name: Name) -> Iterator[str]:
    if name.function is None:
        return
    signature = inspect.signature(name.function)
    for parameter in signature.parameters.values():
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls"):
            yield f"parameter {parameter.name} has no annotation"
    if signature.return_annotation is signature.empty:
        yield "no return annotation"


def undescribed_fields(name: Name) -> Iterator[str]:
    if not name.is_holder or getattr(name.value, "_is_protocol", False):
        return
    described = {part.strip() for entry in name.doc["Attributes"] for part in entry.name.split(",")}
    for field in inspect.signature(name.value).parameters:
        if field not in described and not field.startswith("_"):
            yield f"Attributes does not describe {field}"


def missing_shapes(name: Name) -> Iterator[str]:
    entries = [entry for section in ("Parameters", "Attributes", "Returns") for entry in name.doc[section]]
    for entry in entries:
        kind = entry.type or entry.name
        if re.match(r"(mapping|dict) of ", kind):  # of arrays of several shapes
            continue
        is_array = re.search(r"\b(array|array_like|ndarray|tensor)\b", kind, re.IGNORECASE)
        where = f"{kind} {' '.join(entry.desc)}"
        if is_array and not re.search(r"\bshape\b|\bbroadcast\b|\((\w+,|\w+(, \w+)+|\.\.\., .*)\)", where):
            yield f"{entry.name}: {kind!r} names no shape"


def raised_in(function: Any, owner: type | None = None) -> set[type]:
    """The exceptions that a function and the functions of the library that it calls raise, as far as names tell.

    Kernels check no arguments, and are left out.
    """
    errors: set[type] = set()
    waiting, seen = [(function, owner)], set()
    while waiting:
        function, owner = waiting.pop()
        function = inspect.unwrap(function) if callable(function) else function
        if inspect.isfunction(function) and OURS.match(function.__module__) and function not in seen:
            seen.add(function)
            raised, called = named_in(function, owner)
            errors |= raised
            waiting += [(each, None) for each in called]
    return errors


@functools.cache
def named_in(function: types.FunctionType, owner: type | None) -> tuple[set[type], list[Any]]:
    """The exceptions that a function raises itself, and what it calls."""
    scope = {**vars(builtins), **function.__globals__, "self": owner, "cls": owner}
    errors, called = set(), []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = resolved(node.exc.func if isinstance(node.exc, ast.Call) else node.exc, scope)
            errors |= {error} if isinstance(error, type) else set()
        elif isinstance(node, ast.Call):
            called.append(resolved(node.func, scope))
    return errors, called


def resolved(node: ast.expr, scope: dict[str, Any]) -> Any:
    """What a name or an attribute stands for, or None."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, scope), node.attr, None)
    return None


def missing_errors(name: Name) -> Iterator[str]:
    function, owner = name.function, name.owner
    if isinstance(name.value, type) and not (name.is_holder or name.is_error):
        hook = "__post_init__" if dataclasses.is_dataclass(name.value) else "__init__"
        function, owner = getattr(name.value, hook, None), name.value
    if function is None:
        return
    documented = {part.strip() for entry in name.doc["Raises"] for part in (entry.type or entry.name).split(",")}
    for error in sorted(raised_in(function, owner).difference(UNTOLD), key=str):
        told = documented & {base.__name__ for base in error.__mro__}
        if not told and (name.label, error) not in NOT_REACHED:
            yield f"it can raise {error.__name__}, which Raises does not tell"


def missing_example(name: Name) -> Iterator[str]:
    if not (name.owner or name.is_error) and ">>>" not in "\n".join(name.doc["Examples"]):
        yield "no example"


def missing_cost(name: Name) -> Iterator[str]:
    notes = "\n".join(name.doc["Notes"])
    if name.computes and name.label not in COSTLESS and not re.search(r"O\(|\b[Tt]ime\b|\b[Mm]emory\b|\bcost", notes):
        yield "Notes tell no cost"


def missing_source(name: Name) -> Iterator[str]:
    if name.computes and name.label not in SOURCELESS and not name.doc["References"]:
        yield "no References"


RULES: tuple[Callable[[Name], Iterator[str]], ...] = (
    numpydoc_faults,
    missing_annotations,
    undescribed_fields,
    missing_shapes,
    missing_errors,
    missing_example,
    missing_cost,
    missing_source,
)


@pytest.mark.parametrize("label", public_names())
def test_docstring_keeps_the_rules(label: str) -> None:
    name = loaded(label)
    named = [name, *members(name)]
    assert [f"{each.label}: {fault}" for each in named for rule in RULES for fault in rule(each)] == []


def test_exempt_names_are_public_ones() -> None:
    assert (COSTLESS | SOURCELESS) - set(public_names()) == set()
    assert {f"{module}.{name}" for module in INTERNAL for name in INTERNAL[module] - set(listed(module))} == set()


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(source_of(module))


def listed_in_reference() -> list[str]:
    """The names in the autosummary tables of the reference."""
    names = []
    for page in sorted(REFERENCE.glob("*.md")):
        for table in re.findall(
            r"^\.\. autosummary::\n(?: +:.*\n)*\n((?: +\S+\n)+)", page.read_text("utf-8"), re.MULTILINE
        ):
            names += [line.strip().lstrip("~") for line in table.splitlines()]
    return names


def test_reference_has_each_public_name_once() -> None:
    found = Counter(listed_in_reference())
    assert [name for name, count in found.items() if count > 1] == []
    assert sorted(found) == public_names()


# The rules themselves


def _kept(K: float, /, *, ridge: float = 0.0) -> float:
    """Sum of two numbers.

    Parameters
    ----------
    K : array of shape (n, d)
        The keys.
    ridge : float
        A number, with a colon: here.

    Returns
    -------
    float
        A number.

    Raises
    ------
    ValueError
        If the ridge is negative.

    Notes
    -----
    Time O(1).

    References
    ----------
    Euclid, Elements, book VII.

    Examples
    --------
    >>> 1 + 1
    2
    """
    _check(ridge)
    return K + ridge


def _check(ridge: float) -> None:
    if ridge < 0:
        raise ValueError


def _broken(K: float, ridge=0.0) -> float:
    """Sum of two numbers

    Parameters
    ----------
    K : array
        the keys
    """
    _check(ridge)
    return K + ridge


class _Held:
    """What a function found.

    Attributes
    ----------
    size : int
        A number.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    @property
    def twice(self):
        """The double."""
        return 2 * self.size

    def update(self, chunk: int) -> None:
        """Take a chunk."""


PLANTED = [
    (numpydoc_faults, _broken, ["PR01", "PR08", "PR09", "RT01", "SS03"]),
    (missing_annotations, _broken, ["parameter ridge has no annotation"]),
    (undescribed_fields, _Held, ["Attributes does not describe rank"]),
    (missing_shapes, _broken, ["K: 'array' names no shape"]),
    (missing_errors, _broken, ["it can raise ValueError, which Raises does not tell"]),
    (missing_example, _broken, ["no example"]),
    (missing_cost, _broken, ["Notes tell no cost"]),
    (missing_source, _broken, ["no References"]),
]


@pytest.mark.parametrize(("rule", "value", "faults"), PLANTED, ids=[rule.__name__ for rule, _, _ in PLANTED])
def test_rule_sees_the_planted_fault(rule: Callable[[Name], Iterator[str]], value: Any, faults: list[str]) -> None:
    found = sorted(fault[:4] if rule is numpydoc_faults else fault for fault in rule(Name("planted", value)))
    assert found == faults


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_an_innocent_docstring(rule: Callable[[Name], Iterator[str]]) -> None:
    assert list(rule(Name("kept", _kept))) == []


def test_members_are_looked_at_too() -> None:
    found = {member.label: member for member in members(Name("Held", _Held))}
    assert sorted(found) == ["Held.twice", "Held.update"]
    assert list(missing_annotations(found["Held.twice"])) == ["no return annotation"]
    assert [fault[:4] for fault in numpydoc_faults(found["Held.update"])] == ["PR01"]
