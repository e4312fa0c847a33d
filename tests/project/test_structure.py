"""The structure of the package: layers, homes of third-party packages, public names.

Imports are read from the source with ``ast``, lazy ones included, so that a rule is checked on a machine
without the package in question too. The rules are tables; each check yields what is wrong as text, and is
itself tested on small packages with a planted fault.

Inside: it is about the inside: layers, homes and sizes.
"""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import levattn

ROOT = Path(levattn.__file__).parent

# The folders. A module imports from its own and from lower levels.
LAYERS = {
    0: ("_core", "exceptions"),
    1: ("_kernels", "functions", "plots"),
    2: ("linalg", "sketch", "io"),
    3: ("states",),
    4: ("sensitivity",),
    5: ("sets",),
    6: ("heavy", "attention", "distributed"),
    7: ("", "nn"),  # levattn/__init__.py: the public names
    8: ("integrations",),
    9: ("cli",),
}
LEVEL = {name: level for level, names in LAYERS.items() for name in names}

# Beside the layers: they may use the library up to a level, and only these modules may use them.
SIDE = {"datasets": 1, "data": 0, "definitions": 1, "warming": 7}
USERS_OF_SIDE = {"plots", "cli", *SIDE, ""}

ANYWHERE = {"numpy", "scipy", "array_api_compat"}
VECTOR_CODE = (
    *("_kernels.jit", "_kernels.cache", "_kernels.llvm", "_kernels.scratch"),
    *("_kernels.*.compiled", "_kernels.*.simd"),
)
TENSORS = ("_kernels.tensors", "_kernels.*.torch", "_kernels.*.fused")
COMPILERS = (*VECTOR_CODE, "_kernels.parts")
HOMES = {
    "accelerate": ("integrations.transformers.compression.files",),
    "numba": COMPILERS,
    "llvmlite": VECTOR_CODE,
    "cupy": ("_kernels.cuda_source", "_core.arrays", "_core.device"),
    "torch": ("attention.*", *TENSORS, "distributed.*", "nn", "nn.*", "integrations.*", "warming", "cli.*"),
    "transformers": ("integrations.*", "cli.*"),
    "timm": ("integrations.timm",),
    "kvpress": ("integrations.kvpress",),
    "dask": ("distributed.*",),
    "distributed": ("distributed.*",),
    "ml_dtypes": ("io.*",),
    "safetensors": ("io.*", "integrations.transformers.compression.files"),
    "zarr": ("io.*",),
    "pyarrow": ("io.*",),
    "matplotlib": ("plots",),
    "pandas": ("sets.result",),
    "sklearn": ("integrations.sklearn",),
    "typer": ("cli", "cli.*"),
    "rich": ("_core.threads", "cli", "cli.*"),
    "threadpoolctl": ("_core.blas",),
}
# Whoever imports these modules has asked for the package: everything else optional waits inside functions.
EAGER = {
    "numba": COMPILERS,
    "llvmlite": VECTOR_CODE,
    "sklearn": ("integrations.sklearn",),
    "typer": ("cli.*",),
    "torch": (
        *TENSORS,
        "attention.tokens.torch",
        "nn",
        "nn.*",
        "integrations.transformers.*",
        "integrations.timm",
        "integrations.kvpress",
    ),
    "transformers": ("integrations.transformers.*",),
    "timm": ("integrations.timm",),
    "kvpress": ("integrations.kvpress",),
}

# The compiler's flags are chosen in one module; the rest of the kernels uses its decorators.
JIT_HOME = "_kernels.jit"
COMPILING = {"jit", "helper", "intrinsic"}
PRIVATE_FOLDERS = {"levattn._core", "levattn._kernels"}
JIT_NAMES = {"njit", "jit", "vectorize", "guvectorize", "cfunc", "stencil"}

# Sizes in lines, docstrings not counted. Compiled functions are longer: what they call is compiled into them.
LONGEST_FUNCTION = 60
LONGEST_COMPILED = 120

# A public name of a module means one thing in the library. These stand in more modules than one, and this is why.
TWICE = {
    "leverage_scores": "the same, by dask",
    "sample_rows": "the same, by dask",
    "universal_set": "the same, by dask and by ranks of torch",
    "softmax_state": "the same by dask and by ranks of torch",
    "LevAttention": "timm's form of the layer",
    "prune": "of models of transformers and of timm",
    "memberships": "public, and the kernel that computes them",
    "forward": "the contract of attention kernels",
    "backward": "the contract of attention kernels",
    "forward_tasks": "compiled code of `forward`",
    "backward_tasks": "compiled code of `backward`",
    "SLAB": "rows that a compiled kernel works on at a time: each has its own number",
    "TALL": "rows of a tile: each has its own number",
    "add": "a command adds itself to the program",
}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and how it is imported."""

    target: str
    line: int
    lazy: bool  # inside a function
    typing_only: bool  # under TYPE_CHECKING

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]

    @property
    def own(self) -> str:
        """The name within levattn: "" is the package itself."""
        return self.target.partition(".")[2]


@dataclass
class Module:
    """A source file of the package: "" is ``__init__.py``, "sketch.sizes" a module of a sub-package."""

    name: str
    tree: ast.Module
    is_package: bool
    imports: list[Import] = field(default_factory=list)
    nodes: list[ast.AST] = field(default_factory=list)

    @property
    def head(self) -> str:
        return "cli" if self.name == "__main__" else self.name.partition(".")[0]  # `python -m levattn` is the program

    def at(self, line: int) -> str:
        return f"levattn.{self.name or '__init__'}, line {line}"


def name_of(function: ast.expr) -> str:
    """The last name of what is called: f of f(), and of module.f()."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def read(module: Module, known: set[str]) -> None:
    """Fill in nodes and imports of a module; ``known`` tells whether ``from levattn import x`` imports a module."""
    left: list[tuple[ast.AST, bool, bool]] = [(module.tree, False, False)]
    while left:
        node, lazy, typing = left.pop()
        module.nodes.append(node)
        module.imports += [Import(target, node.lineno, lazy, typing) for target in targets_of(node, module, known)]
        below = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded: list[ast.stmt] = []
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            guarded = node.body
        children = [(child, below, typing or child in guarded) for child in ast.iter_child_nodes(node)]
        left += reversed(children)


def targets_of(node: ast.AST, module: Module, known: set[str]) -> list[str]:
    """The modules that a node of the tree imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = ["levattn", *filter(None, module.name.split("."))]
            base = ".".join([*here[: len(here) - node.level + module.is_package], *filter(None, [base])])
        wholes = [f"{base}.{alias.name}" for alias in node.names]
        return [whole if whole in known else base for whole in wholes]
    if isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def read_package(root: Path) -> list[Module]:
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text("utf-8")
        modules.append(Module(name, ast.parse(text, str(path)), is_package))
    known = {f"levattn.{module.name}" for module in modules}
    for module in modules:
        read(module, known)
    return modules


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unknown_modules(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.head not in LEVEL and module.head not in SIDE:
            yield (
                f"levattn.{module.name} has no level: move it into a module that has one, or add it "
                f"to LAYERS in tests/project/{Path(__file__).name} and to the picture in docs/design.md"
            )


def upward_imports(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        level = LEVEL.get(module.head, SIDE.get(module.head, 0))
        for item in module.imports:
            target = item.own.partition(".")[0]
            if item.package != "levattn" or target == module.head:
                continue
            if target in SIDE and module.head not in USERS_OF_SIDE:
                yield f"{module.at(item.line)}: {item.target} stands beside the library; cli and plots use it"
            elif target in LEVEL and LEVEL[target] >= level:
                yield (
                    f"{module.at(item.line)}: level {level} imports {item.target} of level {LEVEL[target]}; "
                    "move what both need down to a lower one"
                )


def cycles(modules: list[Module]) -> Iterator[str]:
    """Circles of imports, also of those for types: who reads one module of a circle has to read all of them."""
    graph = {module.name: {i.own for i in module.imports if i.package == "levattn"} for module in modules}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "import cycle (lazy ones and types count): " + " <- ".join(f"levattn.{name}" for name in error.args[1])


def misplaced_packages(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for item in module.imports:
            package = item.package
            if package == "levattn" or package in ANYWHERE or package in sys.stdlib_module_names:
                continue
            if package not in HOMES:
                yield f"{module.at(item.line)}: {package} is no dependency; declare it and add it to HOMES"
            elif not matches(module.name, HOMES[package]):
                yield f"{module.at(item.line)}: {package} may be imported only in {', '.join(HOMES[package])}"
            elif not (item.lazy or item.typing_only or matches(module.name, EAGER.get(package, ()))):
                yield f"{module.at(item.line)}: import {package} inside the function that needs it"


def idle_permissions(modules: list[Module]) -> Iterator[str]:
    """What the tables allow and nobody does: rules that forbid less than they could."""
    for title, table in (("HOMES", HOMES), ("EAGER", EAGER)):
        for package, patterns in table.items():
            for pattern in patterns:
                items = [i for m in modules if matches(m.name, [pattern]) for i in m.imports if i.package == package]
                if not any(title == "HOMES" or not (i.lazy or i.typing_only) for i in items):
                    yield f"{title}: no module {pattern} imports {package}; take it out"


def stray_jit(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.name == JIT_HOME:
            continue
        for node in module.nodes:
            named: set[str] = set()
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "numba":
                named = {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("numba", "nb"):
                named = {node.attr}
            for name in sorted(named & JIT_NAMES):
                yield f"{module.at(node.lineno)}: numba.{name}; use a decorator of levattn.{JIT_HOME}"


def costly_calls(modules: list[Module]) -> Iterator[str]:
    """In compiled code each of these would be compiled as a function of its own, for each type and number of axes."""
    for module in modules:
        nodes = module.nodes
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == f"levattn.{JIT_HOME}"]
        if not {alias.name for one in imports for alias in one.names} & {"jit", "helper"}:
            continue
        for node in nodes:
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "np":
                if node.attr.removesuffix("_like") in ("empty", "zeros"):
                    yield f"{module.at(node.lineno)}: np.{node.attr}; use levattn._kernels.scratch"
            elif isinstance(node, ast.Name) and node.id in ("min", "max"):
                yield f"{module.at(node.lineno)}: {node.id}; use smaller or larger of levattn._kernels.llvm"


def stray_statements(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Assert):
                yield f"{module.at(node.lineno)}: assert vanishes under python -O; raise a typed error"
            elif isinstance(node, ast.Name) and node.id == "print" and module.head != "cli":
                yield f"{module.at(node.lineno)}: print; return the value, or warn"


def docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def long_functions(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = {name_of(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}
            most = LONGEST_COMPILED if decorators & COMPILING else LONGEST_FUNCTION
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            if length > most:
                yield f"{module.at(node.lineno)}: {node.name} has {length} lines without docstring; at most {most}"


def names_of(module: Module) -> set[str]:
    """The public names that a module defines."""
    names = set()
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        names.add(getattr(node, "name", "_"))
    return {name for name in names if not name.startswith("_")}


def home_of(module: Module) -> str:
    """The module, or the folder of a kernel's task: its files are the same table for each device."""
    parts = module.name.split(".")
    return ".".join(parts[:2]) if parts[0] == "_kernels" else module.name


def repeated_names(modules: list[Module]) -> Iterator[str]:
    homes: dict[str, set[str]] = {}
    for module in modules:
        for name in () if module.name == "definitions" else names_of(module):  # these mean what they define
            homes.setdefault(name, set()).add(home_of(module))
    for name, places in sorted(homes.items()):
        if len(places) > 1 and name not in TWICE:
            where = ", ".join(sorted(places))
            yield f"{name} is defined in {where}; name what each of them means, or give the reason in TWICE"
    for name in sorted(set(TWICE) & set(homes)):
        if len(homes[name]) == 1:
            yield f"TWICE: {name} is defined once; take it out"


def foreign_privates(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] == "levattn"):
                for alias in node.names:
                    if alias.name.startswith("_") and f"levattn.{alias.name}" not in PRIVATE_FOLDERS:
                        yield f"{module.at(node.lineno)}: {alias.name} is private to {node.module}"


Rule = Callable[[list[Module]], Iterator[str]]
RULES: tuple[Rule, ...] = (
    unknown_modules,
    upward_imports,
    cycles,
    misplaced_packages,
    stray_jit,
    costly_calls,
    stray_statements,
    long_functions,
    repeated_names,
    foreign_privates,
)


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return read_package(ROOT)


def test_levels_are_few() -> None:
    assert len(LAYERS) <= 10


def test_docstrings_do_not_count(tmp_path: Path) -> None:
    function = 'def g():\n    """One line.\n' + "    More.\n" * 80 + '    """\n' + "    x = 1\n" * 59
    modules = write_package(tmp_path, {"functions.py": function})
    assert list(long_functions(modules)) == []


def test_tables_allow_what_is_done_and_no_more(package: list[Module]) -> None:
    assert list(idle_permissions(package)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Rule, package: list[Module]) -> None:
    assert len(package) > 1
    assert list(rule(package)) == []


PLANTED = [
    # rule, file, its source, a part of the report
    (unknown_modules, "stray.py", "x = 1", "levattn.stray has no level"),
    (
        upward_imports,
        "sensitivity/leverage.py",
        "from levattn.sets import f",
        "level 4 imports levattn.sets of level",
    ),
    (upward_imports, "sensitivity/leverage.py", "from levattn import sets", "level 4 imports levattn.sets of level"),
    (upward_imports, "sensitivity/leverage.py", "from .. import sets", "level 4 imports levattn.sets of level"),
    (upward_imports, "sketch/sizes.py", "from ..sets.universal import f", "level 2 imports levattn.sets.universal"),
    (upward_imports, "sketch/sizes.py", "def f():\n    import levattn.sets", "sketch.sizes, line 2"),
    (upward_imports, "heavy/causal.py", "import levattn.attention", "level 6 imports levattn.attention of level 6"),
    (upward_imports, "sensitivity/leverage.py", "import levattn", "imports levattn of level 7"),
    (upward_imports, "sensitivity/leverage.py", "from levattn import universal_set", "imports levattn of level 7"),
    (upward_imports, "sensitivity/leverage.py", "from levattn import datasets", "stands beside the library"),
    (upward_imports, "datasets.py", "from levattn import plots", "level 1 imports levattn.plots"),
    (cycles, "sets/__init__.py", "def f():\n    import levattn.heavy", "levattn.heavy <- levattn.sets"),
    (cycles, "sets/__init__.py", "if TYPE_CHECKING:\n    import levattn.heavy", "levattn.heavy <- levattn.sets"),
    (
        upward_imports,
        "sensitivity/leverage.py",
        "if TYPE_CHECKING:\n    from levattn.sets import f",
        "level 4 imports levattn.sets of level",
    ),
    (misplaced_packages, "functions.py", "import numba", "numba may be imported only in _kernels.jit"),
    (misplaced_packages, "_kernels/gram/definition.py", "from numba import prange", "numba may be imported only"),
    (misplaced_packages, "functions.py", "def f():\n    import torch", "torch may be imported only in attention"),
    (misplaced_packages, "distributed/torch.py", "import torch", "import torch inside the function"),
    (misplaced_packages, "_core/arrays.py", "importlib.import_module('cupy')", "import cupy inside the function"),
    (misplaced_packages, "io/safetensors.py", "if x:\n    import safetensors", "import safetensors inside"),
    (misplaced_packages, "io/__init__.py", "def f():\n    import polars", "polars is no dependency"),
    (misplaced_packages, "cli/__init__.py", "def f():\n    import matplotlib.pyplot", "only in plots"),
    (stray_jit, "_kernels/gram/compiled.py", "@numba.njit(parallel=True)\ndef f(): ...", "numba.njit"),
    (stray_jit, "_kernels/gram/compiled.py", "from numba import njit", "numba.njit"),
    (
        costly_calls,
        "_kernels/gram/compiled.py",
        "import numpy as np\nfrom levattn._kernels.jit import jit\n@jit\ndef f(x): return np.zeros_like(x)",
        "np.zeros_like",
    ),
    (
        costly_calls,
        "_kernels/gram/compiled.py",
        "from levattn._kernels.jit import helper\n@helper\ndef f(x): return min(x, 3)",
        "min; use smaller or larger",
    ),
    (
        long_functions,
        "functions.py",
        "def g():\n" + "    x = 1\n" * 60,
        "g has 61 lines without docstring; at most 60",
    ),
    (
        long_functions,
        "_kernels/gram/compiled.py",
        "@helper(inline=True)\ndef g():\n" + "    x = 1\n" * 120,
        "g has 121 lines without docstring; at most 120",
    ),
    (repeated_names, "io/parquet.py", "def draw(): ...", "draw is defined in io.parquet, plots"),
    (repeated_names, "io/parquet.py", "draw: int = 1", "draw is defined in io.parquet, plots"),
    (repeated_names, "_kernels/online/cpu.py", "class table: ...", "table is defined in _kernels, _kernels.online"),
    (foreign_privates, "io/parquet.py", "from .safetensors import _read", "_read is private to safetensors"),
    (foreign_privates, "io/parquet.py", "from levattn.sets import _read", "_read is private to levattn.sets"),
    (stray_statements, "io/__init__.py", "assert 1", "raise a typed error"),
    (stray_statements, "io/__init__.py", "print(1)", "levattn.io, line 1: print"),
]
INNOCENT = {
    "__init__.py": "from levattn.sensitivity.leverage import leverage_scores",
    "_core/__init__.py": "",
    "_core/arrays.py": "import sys\nimport numpy as np\ndef f():\n    import cupy",
    "_kernels/__init__.py": "def table():\n    from levattn._kernels.gram import compiled\n    return compiled",
    "_kernels/gram/__init__.py": "",
    "_kernels/gram/compiled.py": "from numba import prange\nfrom levattn._kernels.jit import kernel",
    "_kernels/jit.py": "import numba\nkernel = numba.njit(cache=True)",
    "sensitivity/__init__.py": "",
    "sensitivity/leverage.py": "from levattn import _kernels\nfrom levattn._core import arrays",
    "sets/__init__.py": "from levattn.sensitivity.leverage import leverage_scores",
    "heavy/__init__.py": "from typing import TYPE_CHECKING\nfrom levattn.sets import f\n",
    "io/__init__.py": "",
    "io/safetensors.py": "if TYPE_CHECKING:\n    import safetensors\nelse:\n    def f():\n        import safetensors",
    "cli/__init__.py": "",
    "cli/program.py": "import typer\nimport levattn\nfrom levattn import datasets\nprint(levattn)",
    "plots.py": "def draw():\n    import matplotlib",
    "datasets.py": "import numpy",
}


def write_package(root: Path, sources: dict[str, str]) -> list[Module]:
    for name, source in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, "utf-8")
    return read_package(root)


@pytest.mark.parametrize(("rule", "name", "source", "report"), PLANTED)
def test_rule_sees_the_planted_fault(
    tmp_path: Path,
    rule: Rule,
    name: str,
    source: str,
    report: str,
) -> None:
    modules = write_package(tmp_path, {**INNOCENT, name: source})
    found = list(rule(modules))
    assert len(found) == 1
    assert report in found[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_an_innocent_package(tmp_path: Path, rule: Rule) -> None:
    assert list(rule(write_package(tmp_path, INNOCENT))) == []


# The public names


PROGRAMS = [ROOT.parent / "hatch_build.py", *sorted((ROOT.parent / "examples").rglob("*.py"))]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_use_names_and_keywords_of_the_library(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "levattn":
            assert importlib.util.find_spec(str(node.module)), f"line {node.lineno}"
            with suppress(ModuleNotFoundError):  # of an optional package
                importlib.import_module(str(node.module))
            module = sys.modules.get(str(node.module))
            if module is None:
                continue
            absent = {alias.name for alias in node.names} - {*dir(module), *getattr(module, "__all__", ())}
            assert all(importlib.util.find_spec(f"{node.module}.{name}") for name in absent), f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, value = node.func.attr, node.func.value
            if isinstance(value, ast.Name) and value.id == "levattn":
                parameters = inspect.signature(getattr(levattn, called)).parameters
                assert {word.arg for word in node.keywords if word.arg} <= set(parameters), f"line {node.lineno}"


def test_public_names_are_listed_once_and_by_dir() -> None:
    assert len(set(levattn.__all__)) == len(levattn.__all__)
    assert set(levattn.__all__) <= set(dir(levattn))


def test_misspelled_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'leverage_scoers'; did you mean 'leverage_scores'?"):
        _ = levattn.leverage_scoers
    with pytest.raises(AttributeError, match=r"has no attribute 'zzz'$"):
        _ = levattn.zzz
    with pytest.raises(AttributeError, match=r"'levattn.integrations' has no attribute 'keras'"):
        _ = levattn.integrations.keras


def test_adapters_are_attributes_of_their_package() -> None:
    folder = Path(levattn.__file__).parent / "integrations"
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - {"__init__"} == set(levattn.integrations._MODULES) <= set(dir(levattn.integrations))
