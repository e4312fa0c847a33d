"""From a source to a kernel on a device: options, files that are kept, errors. All is real but for the driver.

Inside: failures of files and of the compiler are planted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import nvrtc_library
import pytest

import levattn
from gpu.program import surroundings
from levattn._kernels import cache, cuda_cache, cuda_compile, cuda_source
from levattn._kernels.cuda_compile import OPTIONS, Kernel, architecture, compiled, loaded

ROOT = Path(__file__).parents[2]
SOURCE = "template <typename Real> __global__ void twice(Real *x) { x[threadIdx.x] *= 2; }\n"
TWICE = "twice<float>"
LOWERED = "_Z5twiceIfEvPT_"


class Counted:
    """NVRTC, which notes with which options it compiles."""

    def __init__(self, nvrtc: Any) -> None:
        self._nvrtc = nvrtc
        self.options: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvrtc, name)

    def compileProgram(self, program: Any, options: Any) -> None:  # noqa: N802
        self.options.append(tuple(options))
        self._nvrtc.compileProgram(program, options)


class Module:
    """A module of CuPy, which holds the code that the driver would take."""

    def load(self, code: bytes) -> None:
        self.code = code

    def get_function(self, name: str) -> Any:
        return SimpleNamespace(code=self.code, name=name, ptr=id(self))


def card(nvrtc: Any, capability: str = "90") -> Any:
    """What is asked of CuPy, with a card that is not there."""
    runtime = SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda _device: {"name": b"Tesla V100"})
    device = SimpleNamespace(compute_capability=capability)
    return SimpleNamespace(
        cuda=SimpleNamespace(nvrtc=nvrtc, runtime=runtime, Device=lambda _: device, Module=Module, driver=None)
    )


@pytest.fixture
def nvrtc() -> Counted:
    return Counted(nvrtc_library.of_cupy())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    cache.say_uncached.cache_clear()
    return tmp_path / "kernels"


def function_of(kernel: Any) -> Any:
    return kernel._function


# -- options and architectures -----------------------------------------------------------------------


def test_options_are_ours_alone(nvrtc: Counted) -> None:
    found = function_of(loaded(card(nvrtc), SOURCE, TWICE, 0, "P"))
    assert nvrtc.options == [(*OPTIONS, "--gpu-architecture=sm_90")]
    assert found.name == LOWERED
    assert found.code == compiled(nvrtc, SOURCE, (TWICE,), "sm_90").code
    assert LOWERED.encode() in found.code


def test_a_kernel_of_the_table_comes_the_same_way(nvrtc: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_module", lambda: card(nvrtc, "80"))
    kernel = cuda_source._compiled.__wrapped__("scan", "find_nonfinite", ("float",), 0)
    assert nvrtc.options == [(*OPTIONS, "--gpu-architecture=sm_80")]
    assert "find_nonfinite" in function_of(kernel).name


@pytest.mark.parametrize("source", ["products", "latent"])
def test_subnormal_numbers_stay_what_they_are(nvrtc: Counted, source: str) -> None:
    code = cuda_source.text(f"{source}.cu")
    names = [cuda_source.expression(name, choices[0]) for name, choices in cuda_source.KERNELS[source].items()]
    # NVRTC's expf has an ex2.approx.ftz of numbers that it has scaled, and its log of doubles an rcp.approx.ftz
    flushed = re.compile(rb"(?<!ex2\.approx)(?<!rcp\.approx)\.ftz")
    assert not flushed.search(compiled(nvrtc, code, names, "compute_80").code)
    assert flushed.search(compiled(nvrtc, code, names, "compute_80", ("-ftz=true",)).code)  # as CuPy would


OLD = (50, 75, 80, 86, 87, 89, 90)  # NVRTC 12.0 to 12.7
NEW = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    ("known", "capability", "target"),
    [
        (OLD, 80, "sm_80"),
        (OLD, 90, "sm_90"),
        (OLD, 100, "compute_90"),
        (OLD, 121, "compute_90"),
        (OLD, 88, "compute_87"),
        (NEW, 100, "sm_100"),
        (NEW, 107, "compute_103"),
    ],
)
def test_a_card_that_is_not_known_takes_ptx(known: tuple[int, ...], capability: int, target: str) -> None:
    assert architecture(SimpleNamespace(getSupportedArchs=lambda: known), capability) == target


def test_ptx_is_loaded_where_the_card_is_newer(nvrtc: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: OLD, raising=False)
    found = function_of(loaded(card(nvrtc, "100"), SOURCE, TWICE, 0, "P"))
    assert nvrtc.options == [(*OPTIONS, "--gpu-architecture=compute_90")]
    assert b"\n.target sm_90\n" in found.code
    assert found.name == LOWERED


# -- code that is kept -------------------------------------------------------------------------------


def test_code_is_kept(nvrtc: Counted, folder: Path) -> None:
    first, second = (function_of(loaded(card(nvrtc), SOURCE, TWICE, 0, "P")) for _ in range(2))
    assert len(nvrtc.options) == 1
    assert (first.name, first.code) == (second.name, second.code)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("change", ["source", "name", "card", "options", "version"])
def test_code_of_another_making_is_not_taken(
    nvrtc: Counted, folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    source, name, capability = SOURCE, TWICE, "90"
    if change == "source":
        source += "\n"
    elif change == "name":
        name = "twice<double>"
    elif change == "card":
        capability = "80"
    elif change == "options":
        monkeypatch.setattr(cuda_compile, "OPTIONS", (*OPTIONS, "-DMORE"))
    else:
        monkeypatch.setattr(nvrtc, "getVersion", lambda: (99, 1), raising=False)
    loaded(card(nvrtc, capability), source, name, 0, "P")
    assert len(nvrtc.options) == len(list(folder.iterdir())) == 2


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda content: content[:-1],
    "a header alone": lambda content: content[:32],
    "another byte": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "another name": lambda content: content.replace(b"twice", b"twine", 1),
    "text": lambda _: "Schlüssel\n".encode("latin-1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(nvrtc: Counted, folder: Path, damage: str) -> None:
    right = function_of(loaded(card(nvrtc), SOURCE, TWICE, 0, "P"))
    (path,) = folder.iterdir()
    sound = path.read_bytes()
    path.write_bytes(DAMAGE[damage](sound))
    again = function_of(loaded(card(nvrtc), SOURCE, TWICE, 0, "P"))
    assert (again.name, again.code) == (right.name, right.code)
    assert len(nvrtc.options) == 2
    assert path.read_bytes() == sound


def test_a_sound_file_of_another_kernel_is_not_taken(nvrtc: Counted, folder: Path) -> None:
    loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    (path,) = folder.iterdir()
    loaded(card(nvrtc), SOURCE, "twice<double>", 0, "P")
    (other,) = set(folder.iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    assert function_of(loaded(card(nvrtc), SOURCE, TWICE, 0, "P")).name == LOWERED
    assert len(nvrtc.options) == 3


def test_threads_make_the_same_kernel_at_once(nvrtc: Counted, folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [
            function_of(each) for each in pool.map(lambda _: loaded(card(nvrtc), SOURCE, TWICE, 0, "P"), range(16))
        ]
    assert len({(each.name, each.code) for each in found}) == 1
    assert len(list(folder.iterdir())) == 1  # and no part of one


PROCESS = """
import nvrtc_library, test_cuda_loading as tests
kernel = tests.loaded(tests.card(nvrtc_library.of_cupy()), tests.SOURCE, tests.TWICE, 0, "P")
print(kernel._function.name)
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=surroundings(ROOT / "tests", ROOT / "tests" / "cuda", **environment),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out.split()


def test_processes_make_the_same_kernel_at_once(nvrtc: Counted, folder: Path) -> None:
    processes = [run(PROCESS) for _ in range(2)]
    assert [told(process) for process in processes] == [[LOWERED], [LOWERED]]
    assert len(list(folder.iterdir())) == 1
    loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    assert not nvrtc.options


def test_kernels_are_compiled_where_no_folder_can_be_written(nvrtc: Counted, folder: Path) -> None:
    folder.write_text("")  # a file in its place
    with pytest.warns(levattn.CacheWarning, match=r"compiled code cannot be kept \(.*CUPY_CACHE_DIR"):
        loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    assert (
        function_of(loaded(card(nvrtc), SOURCE, TWICE, 0, "P")).name == LOWERED
    )  # said once: a second would be an error
    assert len(nvrtc.options) == 2


def test_kernels_are_compiled_where_there_is_no_room(
    nvrtc: Counted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cuda_cache.Path, "write_bytes", full)
        with pytest.warns(levattn.CacheWarning, match=r"No space left"):
            loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    assert not list(folder.iterdir())
    loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    assert len(nvrtc.options) == 2


def test_nothing_is_kept_where_cupy_keeps_nothing(
    nvrtc: Counted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    for _ in range(2):
        loaded(card(nvrtc), SOURCE, TWICE, 0, "P")
    assert len(nvrtc.options) == 2
    assert not folder.exists()


# -- errors ------------------------------------------------------------------------------------------


def test_a_card_that_is_too_old(nvrtc: Counted) -> None:
    with pytest.raises(
        ValueError, match=r"CUDA device 0, Tesla V100, of compute capability 7\.0; expected .*8\.0 .*cupy\.asnumpy"
    ):
        loaded(card(nvrtc, "70"), SOURCE, TWICE, 0, "P")
    assert not nvrtc.options


def test_nvrtc_is_not_there() -> None:
    def missing() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    with pytest.raises(ImportError, match=r"CuPy does not find NVRTC.*pip install 'cupy-cuda13x\[ctk\]"):
        loaded(card(SimpleNamespace(getVersion=missing)), SOURCE, TWICE, 0, "P")


def test_a_source_that_does_not_compile(nvrtc: Counted, folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)NVRTC [\d.]+ does not compile twice<float> for sm_90.*undefined"):
        loaded(card(nvrtc), SOURCE.replace("2", "y"), TWICE, 0, "P")
    assert not folder.exists()


# -- shared memory -----------------------------------------------------------------------------------


class Driver:
    """A driver that knows how much shared memory a kernel may have, and notes what it is asked to launch."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self) -> None:
        self.allowed = 0
        self.calls: list[int] = []
        self.launches: list[tuple[Any, ...]] = []

    def funcSetAttribute(self, pointer: int, attribute: int, size: int) -> None:  # noqa: N802
        assert (pointer, attribute) == (5, 8)
        self.allowed = size
        self.calls.append(size)

    def launchKernel(self, function: int, *geometry: int) -> None:  # noqa: N802
        """As cuLaunchKernel: after grid, block, shared memory and stream come pointers to parameters, or `extra`."""
        *launch, shared, stream, pointers, extra = geometry
        assert (function, pointers) == (5, 0)
        assert shared <= self.allowed or shared <= 24 * 1024
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None)  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END
        size = ctypes.c_size_t.from_address(words[3]).value
        self.launches.append((*launch, stream, ctypes.string_at(words[1], size)))


def kernel_of(driver: Driver, parameters: str) -> tuple[Kernel, list[int]]:
    """A kernel of a driver on device 0, and the devices whose context was asked for."""
    asked: list[int] = []
    runtime = SimpleNamespace(memGetInfo=lambda: asked.append(0))
    cuda = SimpleNamespace(driver=driver, runtime=runtime, get_current_stream=lambda: SimpleNamespace(ptr=7))
    return Kernel(SimpleNamespace(ptr=5), cuda, 0, parameters), asked


def test_shared_memory_is_only_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that launch a kernel with different sizes do not take from each other what they asked for."""
    driver = Driver()
    kernel, _ = kernel_of(driver, "")
    monkeypatch.setattr(cuda_source, "_module", lambda: card(None))
    monkeypatch.setattr(cuda_source, "_compiled", lambda *_: kernel)
    monkeypatch.setattr(cuda_source, "layout", lambda *_: "")

    def launch(size: int) -> None:
        cuda_source.launch("dense", "invert_cholesky", (), (1,), (), shared=size)

    for size in (100_000, 60_000, 100_000, 200_000, 60_000):
        launch(size)
    assert driver.calls == [100_000, 200_000]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, [40_000, 210_000, 90_000, 220_000] * 50))
    assert driver.allowed == 220_000
    assert driver.calls == sorted(driver.calls)


# -- arguments ---------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    """Parameters as C lays them out."""

    _fields_ = (
        *(("a", ctypes.c_void_p), ("b", ctypes.c_bool), ("c", ctypes.c_int), ("d", ctypes.c_bool)),
        *(("e", ctypes.c_longlong), ("f", ctypes.c_double), ("g", ctypes.c_uint), ("h", ctypes.c_ulonglong)),
        *(("i", ctypes.c_int), ("j", ctypes.c_bool)),
    )


def test_arguments_lie_where_a_kernel_reads_them() -> None:
    driver = Driver()
    kernel, asked = kernel_of(driver, "P?i?qdIQi?")
    values = 2**63 + 5, True, -3, np.True_, np.int64(-(2**40)), 1, 2**32 - 1, 2**64 - 1, np.int32(4), True
    kernel((3, 2, 1), (64, 1, 1), values, shared_mem=9)
    kernel((1, 1, 1), (32, 1, 1), (0, False, 0, False, 0, 0.5, 0, 0, 0, False))
    (*geometry, stream, words), other = driver.launches
    assert (*geometry, stream) == (3, 2, 1, 64, 1, 1, 7)
    found = Arguments.from_buffer_copy(words.ljust(ctypes.sizeof(Arguments), b"\0"))
    assert [getattr(found, name) for name, *_ in Arguments._fields_] == list(values)
    assert len(words) == Arguments.j.offset + 1  # the driver refuses fewer bytes than its parameters have
    assert Arguments.from_buffer_copy(other[-1].ljust(ctypes.sizeof(Arguments), b"\0")).f == 0.5
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: kernel((1, 1, 1), (32, 1, 1), values), range(2)))
    assert len(asked) in (1, 2)  # once in each thread that has launched nothing yet
    assert driver.launches[-1][-1] == words


@pytest.mark.parametrize("values", [(), (1, 2, 3), (1, 0.5), (1, 2**31)])
def test_arguments_that_do_not_fit_are_refused(values: tuple[Any, ...]) -> None:
    driver = Driver()
    with pytest.raises((struct.error, OverflowError)):
        kernel_of(driver, "Pi")[0]((1, 1, 1), (32, 1, 1), values)
    assert not driver.launches


def test_threads_do_not_share_arguments() -> None:
    """The driver may be at work in one thread while another one packs its arguments."""
    driver, both = Driver(), Barrier(2)
    kernel, _ = kernel_of(driver, "q")
    launch = driver.launchKernel

    def late(*given: int) -> None:
        both.wait(10)
        launch(*given)

    driver.launchKernel = late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda value: kernel((1, 1, 1), (32, 1, 1), (value,)), range(2)))
    assert {words for *_, words in driver.launches} == {struct.pack("q", value) for value in range(2)}


# -- the locale --------------------------------------------------------------------------------------

ALL_SOURCES = """
from levattn._kernels import cuda_source
for source in cuda_source.KERNELS:
    cuda_source.text(f"{source}.cu")
import locale
print(locale.getencoding())
"""


def test_sources_are_read_in_any_locale() -> None:
    told_encoding = told(run(ALL_SOURCES, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"))
    if sys.platform == "linux":
        assert told_encoding != ["UTF-8"]


AFTER_NVRTC = """
import locale, sys
import nvrtc_library, test_cuda_loading as tests
from levattn._kernels import cuda_compile, cuda_source
old = nvrtc_library.release(sys.argv[1])
print(locale.getencoding())
cuda_compile.compiled(old, tests.SOURCE, (tests.TWICE,), "sm_80")
print(locale.getencoding())
cuda_compile._compiled(old, tests.SOURCE, (tests.TWICE,), "sm_80", ())
print(locale.getencoding())
for source in cuda_source.KERNELS:
    cuda_source.text(f"{source}.cu")
"""


@pytest.mark.parametrize("version", ["12.0", "12.4"])
def test_nvrtc_does_not_change_the_locale_of_who_calls(version: str) -> None:
    """These releases do so to the thread that compiles, which is one of its own; sources are read there as well."""
    nvrtc_library.release(version)
    before, after, within = told(run(AFTER_NVRTC, version, LC_ALL="C.UTF-8", PYTHONUTF8="0"))
    assert before == after == "UTF-8"
    assert within != "UTF-8"  # else the thread is not needed
