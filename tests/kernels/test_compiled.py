"""The cache of compiled code: used again while the sources of the kernels are as they were, and only then.

And where it cannot be written or is damaged, code is compiled anew and does the same.

Inside: it is about caches of compiled code, and plants failures of files.
"""

from __future__ import annotations

import ast
import errno
import gc
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numba.core.caching
import numpy as np
import pytest

import levattn
from levattn._kernels import cache as _kernels_cache
from levattn._kernels import jit, llvm
from libraries import needs_torch

SMALL = """
from levattn._kernels.jit import jit
from levattn._kernels.rows.compiled import load_rows  # which imports from llvm.py


@jit
def twice(x):
    return x + x
"""
CALL = """
from levattn._kernels.small import twice

assert twice(3) == 6
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()))
"""


def hits_and_misses(root: Path) -> str:
    """Call a small kernel of the package under `root` in a fresh interpreter; "1 0": from the cache, "0 1": made."""
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(root / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CALL], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_code_is_compiled_again_when_what_it_imports_changes_and_only_then(tmp_path: Path) -> None:
    source = Path(levattn.__file__).parent
    shutil.copytree(source, tmp_path / "levattn", ignore=shutil.ignore_patterns("__pycache__", "data", "compiled"))
    (tmp_path / "levattn" / "_kernels" / "small.py").write_text(SMALL)
    assert hits_and_misses(tmp_path) == "0 1"
    with (tmp_path / "levattn" / "_kernels" / "llvm.py").open("a") as stream:
        stream.write("# changed\n")
    assert hits_and_misses(tmp_path) == "0 1"
    for other in ("factor/cuda", "latent/cpu", "latent/compiled", "tokens/forward", "tokens/simd"):
        with (tmp_path / "levattn" / "_kernels" / f"{other}.py").open("a") as stream:
            stream.write("# changed\n")
    assert hits_and_misses(tmp_path) == "1 0"


FOLDER = Path(jit.__file__).parent
KERNELS = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*.py")
    if re.search("^@(jit|helper|primitive)", path.read_text("utf-8"), re.MULTILINE)
)


@cache
def kernels_imported_by(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text("utf-8")).body  # what is imported for types alone is not compiled
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [module for module in named if module.startswith("levattn._kernels")]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_stamped_by_the_modules_that_it_reaches(name: str) -> None:
    """What its module names of other modules of kernels, and these of others, is among its sources."""
    sources = jit._sources(FOLDER / name)
    for source in sources:
        for module in kernels_imported_by(FOLDER / source):
            place = module.removeprefix("levattn._kernels.").replace(".", "/")
            assert f"{place}/__init__.py" in sources if (FOLDER / place).is_dir() else f"{place}.py" in sources


def test_no_address_is_a_float() -> None:
    @numba.njit
    def read(at, like):  # type: ignore[no-untyped-def]
        return llvm.as_pointer(at, like)[0]

    X = np.array([2.0])
    assert read(X.ctypes.data, X) == 2
    with pytest.raises(numba.TypingError, match="as_pointer is float64, not a whole number"):
        read(float(X.ctypes.data), X)


# -- a cache that is missing, full or damaged: of a small function, in this process -------------------

FUNCTION = "def twice(x):\n    return x + x\n"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Give what returns the function anew, as another process would have it, with a cache in tmp_path / "cache"."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text(FUNCTION)

    def new() -> Any:
        spec = importlib.util.spec_from_file_location("source", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # Code that is loaded imports its module, unless the function that made it is still in memory
        monkeypatch.setitem(sys.modules, "source", module)
        return jit.jit(module.twice)

    _kernels_cache.say_uncached.cache_clear()
    yield new
    _kernels_cache.say_uncached.cache_clear()


def was_cached(function: Any, x: Any = 3) -> bool:
    """Call the function, check what it does, and tell whether its code came from the cache."""
    assert function(x) == 2 * x
    hits, misses = sum(function.stats.cache_hits.values()), sum(function.stats.cache_misses.values())
    assert hits + misses == 1
    return hits == 1


def test_code_is_compiled_without_a_cache_where_no_folder_can_be_written(
    compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(levattn.CacheWarning, match=r"no folder can be written.*NUMBA_CACHE_DIR"):
        assert not was_cached(compiled())
    assert not was_cached(compiled())  # said once: a second warning would be an error here


def test_code_is_compiled_without_a_cache_where_numba_keeps_it_in_another_way(
    compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(numba.core.caching.Cache, "__init__")  # which then takes no function
    with pytest.warns(levattn.CacheWarning, match=r"Numba [0-9.a-z+]+ keeps it in a way"):
        assert not was_cached(compiled())


def test_a_file_in_place_of_the_folder_is_no_folder(compiled: Callable[[], Any], tmp_path: Path) -> None:
    assert not was_cached(compiled())
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("")
    assert not was_cached(compiled())  # Numba takes the folder of the source
    assert was_cached(compiled())


@pytest.mark.parametrize("name", ["_save_index", "_save_data"])
def test_code_runs_where_there_is_no_room_for_it(
    compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(_kernels_cache._Files, name, full)
        with pytest.warns(levattn.CacheWarning, match=r"No space left"):
            assert not was_cached(compiled())
        assert not was_cached(compiled())
    assert not was_cached(compiled())
    assert was_cached(compiled())


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "one-byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "last-byte": lambda data: data[:-1],
    "garbage": lambda data: b"\xff" * len(data),
    "another-pickle": lambda _: b"N.",
    "zeros-in-the-middle": lambda data: data[: len(data) // 3] + bytes(len(data) // 3) + data[len(data) // 3 * 2 :],
    "one-bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_damaged_file_is_written_anew(compiled: Callable[[], Any], tmp_path: Path, suffix: str, damage: str) -> None:
    assert not was_cached(compiled())
    assert was_cached(compiled())
    (file,) = (tmp_path / "cache").rglob(f"*{suffix}")
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert not was_cached(compiled())
    assert was_cached(compiled())


def test_code_that_another_process_put_in_its_place_is_not_run(compiled: Callable[[], Any], tmp_path: Path) -> None:
    # two processes that find an empty index give their code, for arguments of other types, the same number
    whole, floats = compiled(), compiled()
    assert not was_cached(whole, 3)
    assert not was_cached(floats, 0.75)
    first, second = sorted((tmp_path / "cache").rglob("*.nbc"))
    second.write_bytes(first.read_bytes())
    assert {was_cached(compiled(), 3), was_cached(compiled(), 0.75)} == {False, True}
    assert was_cached(compiled(), 3)
    assert was_cached(compiled(), 0.75)


# -- code that comes with the wheel -------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path, compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the archive of the level of this processor, with the function's code for whole numbers."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    monkeypatch.setattr(_kernels_cache, "ARCHIVES", folder)
    kernel = compiled()
    kernel(3)
    has = llvmlite.binding.get_host_cpu_features()
    kinds = {"x86_64": "x86", "arm64": "aarch64"}
    kind = kinds.get(platform.machine(), platform.machine())
    level = next(
        (
            name
            for name, all_of in _kernels_cache.CPU_FEATURES.items()
            if name.startswith(kind) and all(map(has.get, all_of))
        ),
        None,
    )
    if level is None:
        pytest.skip("no code is made for processors of this kind")
    write(folder / f"{level}.zip", _kernels_cache.packed(kernel), _kernels_cache.versions())
    shutil.rmtree(tmp_path / "cache")
    _kernels_cache._archive.cache_clear()
    yield folder / f"{level}.zip"
    _kernels_cache._archive.cache_clear()


def write(path: Path, code: dict[str, bytes], versions: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = versions.encode()
        for name, content in code.items():
            archive.writestr(name, content)


def test_code_of_the_wheel_is_used_and_nothing_is_written(archive: Path, compiled: Callable[[], Any]) -> None:
    function = compiled()
    assert was_cached(function)
    assert function(2**40) == 2**41
    assert not list(archive.parents[1].glob("cache/**/*.nbc"))
    assert not was_cached(compiled(), 1.5)  # a type that the wheel has no code for
    assert was_cached(compiled(), 1.5)


def test_code_of_the_wheel_needs_no_folder(
    archive: Path, compiled: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    function = compiled()
    assert was_cached(function)
    with pytest.warns(levattn.CacheWarning, match=r"no folder can be written.*NUMBA_CACHE_DIR"):
        assert function(1.5) == 3


def test_code_of_an_older_source_is_not_used(archive: Path, compiled: Callable[[], Any]) -> None:
    source = archive.parents[1] / "source.py"
    source.write_text(FUNCTION + "# changed\n")
    jit._source.cache_clear()
    assert not was_cached(compiled())


@pytest.mark.parametrize("level", list(_kernels_cache.CPU_FEATURES))
def test_code_for_vectors_of_another_width_is_not_used(
    archive: Path, compiled: Callable[[], Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sizes buffers by the width that the processor has, and code by the one that it was made for."""
    if archive.stem != level:
        archive.rename(archive.with_stem(level))
        assert not was_cached(compiled())
    else:
        features = dict(llvmlite.binding.get_host_cpu_features())
        features["avx512f"] = not features.get("avx512f", False)
        monkeypatch.setattr(_kernels_cache.llvm, "get_host_cpu_features", lambda: features)
        assert not was_cached(compiled())


@pytest.mark.parametrize("fault", ["other Numba", "damaged code", "cut short", "other code", "other processor"])
def test_code_of_the_wheel_that_does_not_fit_is_compiled_anew(
    archive: Path, compiled: Callable[[], Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive.read_bytes()
    if fault == "other Numba":
        archive.write_bytes(content.replace(numba.__version__.encode(), b"0.0.0"))
    elif fault == "damaged code":
        middle = len(content) // 2
        archive.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif fault == "other code":
        with zipfile.ZipFile(archive) as sound:
            names = sound.namelist()
        write(archive, dict.fromkeys(names, b"no code"), _kernels_cache.versions())
    elif fault == "cut short":
        archive.write_bytes(content[: len(content) // 2])
    else:
        monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not was_cached(compiled())


def test_garbage_is_collected_again_when_the_last_has_compiled() -> None:
    within, leave = threading.Event(), threading.Event()

    def other() -> None:
        with jit._uncollected:
            within.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with suppress(ZeroDivisionError), jit._uncollected:
        thread.start()
        assert within.wait(60)
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert not gc.isenabled()  # the other still compiles
    leave.set()
    thread.join()
    assert gc.isenabled()


GRADIENTS = """
import torch
from levattn.attention import latte
torch.manual_seed(0)
given = [torch.randn(2, 9, 3, requires_grad=True), torch.randn(2, 9, 3, requires_grad=True), torch.randn(2, 9, 4)]
if {forward}:
    latte(*(x.detach() for x in given))
else:
    found = torch.autograd.grad(latte(*given).square().sum(), given[:2])
    Q, K, V = wide = [x.detach().double().requires_grad_() for x in given]
    terms = K.exp()[..., None]  # of the definition, which compiles nothing
    averages = (terms * V[..., None, :]).cumsum(1) / terms.cumsum(1)
    expected = torch.autograd.grad((Q.softmax(-1)[..., None] * averages).sum(2).square().sum(), wide[:2])
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
"""


@needs_torch
@pytest.mark.thorough
def test_code_that_is_compiled_beside_code_from_the_cache_calls_its_own_functions(tmp_path: Path) -> None:
    """One process infers, and a later one trains: functions of the two kernels once had the same names."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for forward in (True, False):
        code = GRADIENTS.format(forward=forward)
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
