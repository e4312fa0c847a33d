"""The emulator of CUDA kernels shows what a device does, and finds what would go wrong there.

Inside: it is about the emulator, which runs the sources of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import emulator
from emulator import DeviceError, Host, Kernel, compiled, on_host
from levattn._kernels import cuda_source

pytestmark = pytest.mark.usefixtures("main_memory")

ORDERS = range(6)
NOTHING = np.intp(0)
FULL = "0xffffffffu"
LANE = np.arange(32)


def kernel(code: str, *names: str) -> Kernel:
    return compiled(code, names or ("run",))[names[0] if names else "run"]


def results(
    run: Kernel, monkeypatch: pytest.MonkeyPatch, *args: Any, block: Any = (64,), grid: Any = (4,)
) -> set[bytes]:
    """The contents of the last argument after launches in several orders."""
    found = set()
    for order in ORDERS:
        monkeypatch.setattr(emulator, "order", order)
        out = args[-1].copy()
        run(grid, block, (*args[:-1], out))
        found.add(out.tobytes())
    return found


def one_of(bodies: Sequence[str], k: int) -> Kernel:
    """A kernel of the argument `T *out` with a given body, compiled together with the others."""
    code = "".join(
        f"template <typename T>\n__global__ void run_{i}(T *out) {{\n{bodies[i]}\n}}\n" for i in range(len(bodies))
    )
    return compiled(code, tuple(f"run_{i}<int>" for i in range(len(bodies))))[f"run_{k}<int>"]


# -- order of threads and blocks -------------------------------------------------------

REVERSED = """
    __global__ void run(int *out) {{
        __shared__ int there[64];
        there[threadIdx.x] = threadIdx.x;
        {barrier}
        out[blockIdx.x * 64 + threadIdx.x] = there[63 - threadIdx.x];
    }}"""
HALVED = """
    __global__ void run(int *out) {{
        __shared__ volatile int there[64];
        there[threadIdx.x] = threadIdx.x;
        __syncthreads();
        for (int half = 16; half; half /= 2) {{
            const int more = threadIdx.x % 32 < half ? there[threadIdx.x + half] : 0;
            {barrier}
            there[threadIdx.x] += more;
            {barrier}
        }}
        out[blockIdx.x * 64 + threadIdx.x] = there[threadIdx.x / 32 * 32];
    }}"""


@pytest.mark.parametrize(
    ("code", "barrier", "answer"),
    [(REVERSED, "__syncthreads();", np.arange(64)[::-1]), (HALVED, "__syncwarp();", np.repeat([496, 1520], 32))],
    ids=["block", "warp"],
)
def test_a_barrier_makes_the_order_irrelevant_and_without_it_a_race_shows(
    code: str, barrier: str, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = np.zeros(256, np.int32)
    found = results(kernel(code.format(barrier=barrier)), monkeypatch, zeros)
    assert found == {np.tile(answer, 4).astype(np.int32).tobytes()}
    assert len(results(kernel(code.format(barrier="")), monkeypatch, zeros)) > 1


# -- what barriers, collectives and intrinsics return ----------------------------------

XOR = f"__shfl_xor_sync({FULL}, x, 16)"
VALUES: tuple[tuple[str, Any, int], ...] = (  # expressions of `lane` and `x = 10 lane`, what they are, and threads
    ("__syncthreads_or(threadIdx.x == 50)", 1, 64),
    ("__syncthreads_or(0)", 0, 64),
    ("__syncthreads_and(threadIdx.x < 64)", 1, 64),
    ("__syncthreads_and(threadIdx.x)", 0, 64),
    (XOR, 10 * (LANE ^ 16), 32),
    (f"__shfl_xor_sync({FULL}, x, 8, 8)", 10 * np.where(LANE & 8, LANE ^ 8, LANE), 32),
    (
        "lane < 16 ? __shfl_xor_sync(0xffffu, x, 3) : __shfl_xor_sync(0xffff0000u, x, 5)",
        10 * (LANE ^ np.repeat([3, 5], 16)),
        32,
    ),
    ("lane < 16 ? __shfl_xor_sync(0xffffu, x, lane < 8 ? 24 : 0) : x", np.where(LANE < 8, -1, 10 * LANE), 32),
    (f"__ballot_sync({FULL}, lane % 2)", -0x55555556, 32),
    (f"__any_sync({FULL}, lane == 9)", 1, 32),
    (f"__any_sync({FULL}, 0)", 0, 32),
    (
        f"__ballot_sync({FULL}, lane < 40)",
        np.repeat([-1, 0xFF], [32, 8]),
        40,
    ),  # of the second warp eight lanes are there
    ("lane % 3 ? 0 : (__syncwarp(0x49249249u), 1)", LANE % 3 == 0, 32),
    ("max(1.0, 0.0 / 0.0)", 1, 1),
    ("__float_as_uint(__int_as_float(0x40490fdb))", 0x40490FDB, 1),
    ("(int)(__double_as_longlong(-2.0) >> 52)", -1024, 1),
    ("fma(1 + 0x1p-30, 1 - 0x1p-30, -1.0) == -0x1p-60", 1, 1),
    ("(1 + 0x1p-30) * (1 - 0x1p-30) - 1.0 == 0", 1, 1),
    ("fma(1 + 0x1p-13f, 1 - 0x1p-13f, -1.0f) == -0x1p-26f", 1, 1),
)


@pytest.mark.parametrize("k", range(len(VALUES)), ids=[value[0] for value in VALUES])
def test_values(k: int) -> None:
    expressions, answers, sizes = zip(*VALUES, strict=True)
    bodies = [
        f"const int lane = threadIdx.x; const T x = (T)(10 * lane); out[lane] = (T)({each});" for each in expressions
    ]
    out = np.zeros(sizes[k], np.int32)
    one_of(bodies, k)((1,), (sizes[k],), (out,))
    np.testing.assert_array_equal(out, answers[k])


# -- what is reported ------------------------------------------------------------------

STUCK = (
    (
        "if (threadIdx.x < 32) __syncthreads(); else __syncwarp();\n__syncthreads();",
        "32 of 64 threads wait at __syncthreads of line 3, 32 of 64 .* of line 4, 0 have ended",
    ),
    ("if (threadIdx.x < 5) __syncthreads();\nelse __syncthreads();", "5 of 64 .*, 59 of 64"),
    ("if (threadIdx.x < 5) __syncthreads(); else __syncthreads_or(1);", "5 of 64 .*, 59 of 64 .*__syncthreads_or"),
    ("if (threadIdx.x > 32) __syncwarp(); else __syncthreads();", "33 of 64 .*, 31 of 64 .* __syncwarp"),
    ("if (threadIdx.x % 2) __syncwarp(); else __any_sync(~0u, 1);", "32 of 64 .* a vote of line .*, 32 of 64"),
    (
        "if (threadIdx.x % 2) return;\nif (threadIdx.x) __syncthreads(); else __syncwarp();",
        "1 of 64 .*, 32 have ended",
    ),
    ("if (threadIdx.x == 7) __shfl_xor_sync(3u, 1, 0);", "a shuffle of line .* with a mask that does not name it"),
)
FAULTS = (
    (
        "int room[4]; room[threadIdx.x] = 1; out[0] = room[out[0]];",
        r"thread \(\d+, 0, 0\) leaves the bounds of an array",
    ),
    (
        "__shared__ T there[4][8]; there[3][threadIdx.x] = 1; __syncthreads(); out[0] = there[3][7];",
        "leaves the bounds",
    ),
    ("out[0] = 1 << (threadIdx.x + 20);", "shifts by more bits than there are in line"),
    ("out[0] = 5 / (12 - (int)threadIdx.x);", "divides by zero"),
    ("out[0] = ((uint2 *)((char *)out + 4))->y;", "at an address that is no multiple"),
    ("__shared__ T there[8]; *(uint4 *)(there + threadIdx.x % 2) = {}; out[0] = there[4];", "no multiple of the size"),
    ("if (threadIdx.x == 9) out[1ll << 50] = 1; __syncthreads();", r"thread \(9, 0, 0\) reads or writes where"),
    ("if (threadIdx.x == 9) out[0] = *(T *)nullptr;", "where no memory is"),
    ("volatile char room[1 << 18]; room[out[0]] = room[1]; out[0] = room[0];", "its stack is full"),
)


@pytest.mark.parametrize("k", range(len(STUCK) + len(FAULTS)))
def test_barriers_that_cannot_fill_and_faults_of_a_thread_are_reported(k: int) -> None:
    bodies, reports = zip(*STUCK, *FAULTS, ("__syncthreads(); out[0] = 1;", ""), strict=True)
    out = np.zeros(1, np.int32)
    with pytest.raises(DeviceError, match=rf"^run_{k}<int>, block \(\d, 0, 0\): .*{reports[k]}"):
        one_of(bodies, k)((3,), (64,), (out,))
    assert out[0] == 0
    one_of(bodies, len(bodies) - 1)((3,), (64,), (out,))  # the next launch starts afresh
    assert out[0] == 1


def test_threads_that_have_ended_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = kernel("""
        __global__ void run(int *out) {
            if (threadIdx.x % 3 == 0) return;
            out[threadIdx.x] = __syncthreads_and(1) + __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1);
        }""")
    thread = np.arange(64)
    other = np.where((thread ^ 1) % 3, thread ^ 1, -1)  # an ended thread has nothing to give
    expected = np.where(thread % 3, 1 + other, 0).astype(np.int32)
    assert results(run, monkeypatch, np.zeros(64, np.int32), grid=(1,)) == {expected.tobytes()}


# -- memory ----------------------------------------------------------------------------


def test_nothing_is_left_in_shared_memory() -> None:
    run = kernel("""
        __global__ void run(double *out) {
            __shared__ double there[2];
            out[blockIdx.x] = there[1];
            there[1] = 5;
        }""")
    out = np.zeros(3)
    run((3,), (1,), (out,))
    assert np.isnan(out).all()


@pytest.mark.parametrize("index", [-1, -1000, 20, 21, 5000])
def test_writing_out_of_bounds_is_reported(index: int) -> None:
    run = kernel("__global__ void run(const int *in, int *out, long long at) { out[at] = in[0]; }")
    ones, out = np.ones(3, np.int32), np.zeros(20, np.int32)
    run((1,), (1,), (ones, out, np.int64(19)))
    assert out[19] == 1
    place = rf"4 bytes out of bounds around argument 1 .* {4 * index} bytes from its start"
    with pytest.raises(DeviceError, match=place):
        run((1,), (1,), (ones, out, np.int64(index)))


def test_reading_out_of_bounds_poisons() -> None:
    run = kernel("__global__ void run(const double *in, double *out) { out[0] = in[-1]; out[1] = in[3]; }")
    out = np.zeros(2)
    run((1,), (1,), (np.ones(3), out))
    assert np.isnan(out).all()


def test_views_keep_their_strides() -> None:
    run = kernel("__global__ void run(double *out, int step) { out[(int)threadIdx.x * step] = threadIdx.x; }")
    out, expected = np.full((9, 5), -1.0), np.full((9, 5), -1.0)
    run((1,), (9,), (out[:, 2], np.int32(5)))
    expected[:, 2] = range(9)
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(DeviceError, match="8 bytes from its start"):  # between the entries of the view
        run((1,), (2,), (out[:, 2], np.int32(1)))
    backwards = np.zeros(6)
    run((1,), (6,), (backwards[::-1], np.int32(-1)))
    np.testing.assert_array_equal(backwards, np.arange(6)[::-1])


def test_allocations_are_aligned_as_on_a_device() -> None:
    run = kernel("__global__ void run(const float *in, int *out) { *out = (int)((unsigned long long)in % 256); }")
    out = np.zeros(1, np.int32)
    for first in (0, 1, 70):
        run((1,), (1,), (np.zeros(99, np.float32)[first:], out))
        assert out[0] == 4 * first % 256


def test_shared_memory_of_any_size() -> None:
    code = (
        cuda_source.text("shared.cuh")
        + """
        __global__ void run(double *out, int at) {
            DYNAMIC_SHARED(bytes);
            double *const there = (double *)bytes;
            out[0] = there[0];
            __syncthreads();
            there[at + (int)threadIdx.x] = threadIdx.x;
            __syncthreads();
            out[1 + threadIdx.x] = there[at + 7 - (int)threadIdx.x];
        }"""
    )
    run, out = kernel(code), np.zeros(9)
    for _ in range(2):
        run((3,), (8,), (out, np.int32(0)), shared_mem=64)
        assert np.isnan(out[0])  # nothing is left of another block
        np.testing.assert_array_equal(out[1:], np.arange(8)[::-1])
    for at, told in ((1, "wrote past its 64 bytes of dynamic shared memory"), (-1, "wrote before its dynamic")):
        with pytest.raises(DeviceError, match=told):
            run((3,), (8,), (out, np.int32(at)), shared_mem=64)
    with pytest.raises(DeviceError, match="max_dynamic_shared_size_bytes"):
        run((3,), (8,), (out, np.int32(0)), shared_mem=1 << 17)
    run.max_dynamic_shared_size_bytes = 1 << 17
    run((3,), (8,), (out, np.int32(0)), shared_mem=1 << 17)


# -- arguments and launches ------------------------------------------------------------

PARAMETERS = "double *a, int b, const unsigned char *c, unsigned long long d, float e, bool f, const Half *g"
GOOD = (
    *(np.zeros(1), np.int32(1), np.zeros(1, np.bool_), np.uint64(1), np.float32(1), np.True_),
    np.zeros(1, np.uint16),
)


@pytest.fixture
def run() -> Kernel:
    half = "struct Half { unsigned short bits; };"
    return kernel(f"{half}\n__global__ void run({PARAMETERS}) {{ *a = b + *c + d + e + f + g->bits; }}")


@pytest.mark.parametrize(
    ("number", "wrong", "told"),
    [
        (0, np.zeros(1, np.float32), r"double\*: expected a numpy array of float64, or NOTHING, got one of float32"),
        (0, np.zeros(1, ">f8"), "expected a numpy array of float64"),
        (0, None, "got None of type NoneType"),
        (0, np.intp(8), "got np.int64"),
        (0, np.frombuffer(bytearray(9), np.float64, 1, 1), "not aligned"),
        (0, np.broadcast_to(np.zeros(1), (3,)), "read-only"),
        (1, 1, r"int: expected a numpy scalar of int32, got 1 of type int"),
        (1, np.int64(1), "got np.int64"),
        (1, np.zeros((), np.int32), "got array"),
        (2, np.zeros(1, np.int8), "uint8 or bool"),
        (3, np.int64(1), "unsigned long long"),
        (4, np.float64(1), "float32"),
        (5, True, "numpy scalar of bool"),
        (6, np.zeros(1, np.int16), "uint16 or float16"),
    ],
)
def test_others_are_refused(run: Kernel, number: int, wrong: Any, told: str) -> None:
    with pytest.raises(TypeError, match=f"^argument {number} of run is .*{told}"):
        run((1,), (1,), (*GOOD[:number], wrong, *GOOD[number + 1 :]))


def test_so_are_another_number_of_them_and_parameters_of_unknown_types(run: Kernel) -> None:
    for count in (0, 6, 8):
        with pytest.raises(TypeError, match=f"run takes 7 arguments, got {count}"):
            run((1,), (1,), (GOOD * 2)[:count])
    pairs = kernel("struct Pair { int a, b; };\n__global__ void run(Pair *pairs) {}")
    with pytest.raises(TypeError, match=r"no parameters of type Pair\*"):
        pairs((1,), (1,), (np.zeros(2, np.int32),))


@pytest.mark.parametrize(
    ("grid", "block", "shared", "told"),
    [
        ((0,), (1,), 0, "positive"),
        ((1,), (1, 0), 0, "positive"),
        ((), (1,), 0, "one to three"),
        ((1, 1, 1, 1), (1,), 0, "one to three"),
        ((2**31,), (1,), 0, "blocks"),
        ((1, 65536), (1,), 0, "blocks"),
        ((1, 1, 65536), (1,), 0, "blocks"),
        ((1,), (1025,), 0, "1024 threads"),
        ((1,), (32, 33), 0, "1024 threads"),
        ((1,), (1, 1, 65), 0, "64 of them in z"),
        ((1,), (1,), 232449, "232448 bytes"),
        ((1,), (1,), -1, "bytes"),
        ((1,), (1,), 49153, "max_dynamic_shared_size_bytes are 49152"),
    ],
)
def test_so_are_launches_that_no_device_takes(run: Kernel, grid: Any, block: Any, shared: int, told: str) -> None:
    with pytest.raises(DeviceError, match=told):
        run(grid, block, GOOD, shared_mem=shared)


def test_so_are_blocks_beyond_the_bounds_of_the_kernel() -> None:
    code = """
        constexpr int SIDE = 4;  // __global__ void unseen(
        template <typename T, int side>
        __global__ void __launch_bounds__((SIDE + side) * max(1, side), 2) run(T *out) { out[threadIdx.x] = side; }
        __global__ void __launch_bounds__(SIDE)
            plain(double *out) {}
        __global__ void free_one(double *out) {}"""
    wide, plain, free = compiled(code, ("run<double, 4>", "plain", "free_one")).values()
    assert (wide.bound, plain.bound, free.bound) == (32, 4, 1024)
    out = np.zeros(33)
    wide((1,), (32,), (out,))
    with pytest.raises(DeviceError, match="__launch_bounds__ are 32"):
        wide((1,), (33,), (out,))


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(RuntimeError, match=r"wrong\.cu:2:\d+: error"):
        compiled("__global__ void run(int *out) {\n*out = missing; }", ("run",), "wrong.cu")


# -- launches of the library -----------------------------------------------------------


def test_launches_of_the_library_run_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "own.cu").write_text(
        '#include "own.cuh"\n'
        "#define OWN_PARAMETERS T *x, long long n, \\\n    const T *more\n"
        "template <typename T>\n"
        "__global__ void __launch_bounds__(64) scale(OWN_PARAMETERS, double by, bool up, T *y) { // (a, b)\n"
        "    if (n && up && !more && !y) scaled(x, (T)by);\n}\n"
    )
    (tmp_path / "own.cuh").write_text(
        "template <typename T>\n__device__ void scaled(T *x, T by) { x[blockIdx.x * 64 + threadIdx.x] *= by; }\n"
    )
    monkeypatch.setattr(cuda_source, "FOLDER", tmp_path)
    monkeypatch.setitem(cuda_source.KERNELS, "own", {"scale": (("float",), ("double",))})
    with monkeypatch.context() as patch:
        xp = on_host(patch, 3)
        assert (cuda_source.namespace(), emulator.order) == (xp, 3)
        for type, dtype in (("float", np.float32), ("double", np.float64)):
            x = xp.ones(128, dtype)
            for shared in (0, 100_000):  # much shared memory is asked for
                cuda_source.launch(
                    "own", "scale", [type], (2,), [x, 1, None, 3, True, None], threads=64, shared=shared
                )
            cuda_source.launch("own", "scale", [type], (2, 0), [])  # nothing to do
            np.testing.assert_array_equal(x, 9)
        with pytest.raises(ValueError, match="argument"):
            cuda_source.launch("own", "scale", ["float"], (2,), [x])
        with pytest.raises(LookupError, match=r"scale<int> of own\.cu is not in the table"):
            cuda_source.launch("own", "scale", ["int"], (1,), [])
    assert emulator.order == 1


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (4, 5)])
def test_memory_that_nobody_has_written_is_nan(shape: tuple[int, ...]) -> None:
    xp = Host()
    for array in (xp.empty(shape), xp.empty(shape, order="F"), xp.empty_like(np.zeros(shape).T)):
        assert np.isnan(array).all()
        assert array.dtype == np.float64
    assert (xp.empty(shape, np.int64) == -1).all()
    assert xp.asnumpy(xp.zeros(3)).tolist() == [0, 0, 0]
