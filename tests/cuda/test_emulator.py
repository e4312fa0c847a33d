"""The emulator of CUDA kernels shows what a device does, and finds what would go wrong there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import emulator
from emulator import DeviceError, Host, Kernel, compiled, on_host
from levattn._kernels import cuda_source

ORDERS = range(6)
NOTHING = cuda_source.NOTHING
FULL = "0xffffffffu"
DTYPES = {
    "int": "i4",
    "unsigned int": "u4",
    "long long": "i8",
    "unsigned long long": "u8",
    "float": "f4",
    "double": "f8",
}


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


def one_of(bodies: Sequence[str], k: int, types: Sequence[str] = ("int",), type: str = "int") -> Kernel:
    """A kernel of the argument `T *out` with a given body, compiled together with the others."""
    code = "".join(
        f"template <typename T>\n__global__ void run_{i}(T *out) {{\n{bodies[i]}\n}}\n" for i in range(len(bodies))
    )
    names = tuple(f"run_{i}<{each}>" for i in range(len(bodies)) for each in types)
    return compiled(code, names)[f"run_{k}<{type}>"]


def of_lanes(
    expressions: Sequence[str], k: int, n: int = 32, types: Sequence[str] = ("int",), type: str = "int"
) -> np.ndarray:
    """The values of an expression of `lane` and `x = 10 lane` in the threads of a block."""
    bodies = [
        f"const int lane = threadIdx.x; const T x = (T)(10 * lane); out[lane] = (T)({each});" for each in expressions
    ]
    out = np.zeros(n, DTYPES[type])
    one_of(bodies, k, types, type)((1,), (n,), (out,))
    return out


class TestThreads:
    def test_every_thread_of_every_block_runs_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel("""
            __global__ void run(int *out) {
                const long long block = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
                const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
                out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + (int)threadIdx.y;
            }""")
        grid, block = (5, 3, 2), (7, 2, 3)
        out = results(run, monkeypatch, np.zeros(30 * 42, np.int32), block=block, grid=grid)
        assert out == {np.tile(np.repeat([1, 2], 7), 90).astype(np.int32).tobytes()}

    def test_kernels_of_one_name_share_nothing(self) -> None:
        """Static variables of templates are one object in all of a process, unless the libraries keep theirs."""
        code = """
            template <int size>
            __global__ void run(double *out) {{
                __shared__ double there[size + {more}];
                there[size + {more} - 1] = {more};
                out[0] = sizeof there / sizeof *there;
            }}"""
        out = np.zeros(1)
        for more in (1, 1000):
            kernel(code.format(more=more), "run<2>")((1,), (1,), (out,))
            assert out[0] == 2 + more

    def test_python_threads_take_turns(self) -> None:
        run = kernel("__global__ void run(int *out) { __syncthreads(); out[threadIdx.x] = threadIdx.x; }")
        outs = [np.zeros(32 * k, np.int32) for k in range(1, 9)]
        threads = [threading.Thread(target=run, args=((1,), (out.size,), (out,))) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all((out == np.arange(out.size)).all() for out in outs)

    def test_they_have_a_stack(self) -> None:
        run = kernel("""
            __global__ void run(double *out) {
                double room[8000];
                for (int i = 0; i < 8000; ++i) room[i] = threadIdx.x + i;
                __syncthreads();
                double total = 0;
                for (int i = 0; i < 8000; ++i) total += room[i];
                out[threadIdx.x] = total;
            }""")
        out = np.zeros(256)
        run((1,), (256,), (out,))
        np.testing.assert_array_equal(out, np.arange(8000).sum() + 8000 * np.arange(256))


REVERSE = """
    __global__ void run(const int *in, int *out) {{
        __shared__ int there[64];
        there[threadIdx.x] = in[threadIdx.x];
        {barrier}
        out[blockIdx.x * 64 + threadIdx.x] = there[63 - threadIdx.x];
    }}"""


class TestOrder:
    def test_a_barrier_makes_it_irrelevant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel(REVERSE.format(barrier="__syncthreads();"))
        values = np.arange(64, dtype=np.int32)
        assert results(run, monkeypatch, values, np.zeros(256, np.int32)) == {np.tile(values[::-1], 4).tobytes()}

    def test_a_missing_barrier_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel(REVERSE.format(barrier=""))
        assert len(results(run, monkeypatch, np.arange(64, dtype=np.int32), np.zeros(256, np.int32))) > 2

    def test_a_race_within_a_warp_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        code = """
            __global__ void run(int *out) {{
                __shared__ volatile int there[32];
                there[threadIdx.x] = threadIdx.x;
                __syncwarp();
                for (int half = 16; half; half /= 2) {{
                    const int more = threadIdx.x < half ? there[threadIdx.x + half] : 0;
                    {barrier}
                    there[threadIdx.x] += more;
                    {barrier}
                }}
                out[threadIdx.x] = there[0];
            }}"""
        zeros = np.zeros(32, np.int32)
        synced = results(kernel(code.format(barrier="__syncwarp();")), monkeypatch, zeros, block=(32,), grid=(1,))
        assert synced == {np.full(32, 496, np.int32).tobytes()}
        assert len(results(kernel(code.format(barrier="")), monkeypatch, zeros, block=(32,), grid=(1,))) > 1

    def test_that_of_blocks_is_another_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel("__global__ void run(int *out) { out[0] = 100 * out[0] + blockIdx.x; }")
        found = results(run, monkeypatch, np.zeros(1, np.int32), block=(1,))
        assert np.int32(10203).tobytes() in found
        assert len(found) > 2

    def test_a_seed_repeats_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel("__global__ void run(int *out) { out[1 + atomicAdd(out, 1)] = 64 * blockIdx.x + threadIdx.x; }")
        for order in ORDERS:
            monkeypatch.setattr(emulator, "order", order)
            first, second = np.zeros((2, 257), np.int32)
            run((4,), (64,), (first,))
            run((4,), (64,), (second,))
            np.testing.assert_array_equal(first, second)
            np.testing.assert_array_equal(np.sort(first[1:]), np.arange(256))


class TestBarriers:
    def test_threads_that_have_ended_are_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel("""
            __global__ void run(int *out) {
                if (threadIdx.x % 3 == 0) return;
                out[threadIdx.x] = __syncthreads_count(1) + __shfl_sync(0xffffffffu, (int)threadIdx.x, 1);
            }""")
        out = np.array([0 if i % 3 == 0 else 42 + i // 32 * 32 + 1 for i in range(64)], np.int32)
        out[32:] = [0 if i % 3 == 0 else -1 + 42 for i in range(32, 64)]  # lane 1 of that warp is thread 33: ended
        assert results(run, monkeypatch, np.zeros(64, np.int32), grid=(1,)) == {out.tobytes()}

    COUNTS = (
        ("__syncthreads_or(threadIdx.x == 50)", 1),
        ("__syncthreads_or(0)", 0),
        ("__syncthreads_and(threadIdx.x < 64)", 1),
        ("__syncthreads_and(threadIdx.x)", 0),
        ("__syncthreads_count(threadIdx.x & 16)", 32),
    )

    @pytest.mark.parametrize("k", range(len(COUNTS)))
    def test_they_count(self, k: int) -> None:
        counts, answers = zip(*self.COUNTS, strict=True)
        np.testing.assert_array_equal(of_lanes(counts, k, 64), answers[k])

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
        ("if (threadIdx.x == 7) __shfl_sync(3u, 1, 0);", "a shuffle of line .* with a mask that does not name it"),
    )

    @pytest.mark.parametrize("k", range(len(STUCK)))
    def test_one_that_cannot_fill_is_reported(self, k: int) -> None:
        bodies, reports = zip(*self.STUCK, strict=True)
        with pytest.raises(DeviceError, match=rf"^run_{k}<int>, block \(\d, 0, 0\): .*{reports[k]}"):
            one_of(bodies, k)((3,), (64,), (np.zeros(1, np.int32),))

    def test_the_next_launch_starts_afresh(self) -> None:
        run = kernel("""
            __global__ void run(int *out, bool stuck) {
                if (!stuck || threadIdx.x < 7) __syncthreads();
                if (stuck && threadIdx.x >= 7) __syncwarp(0xffffffffu);
                out[threadIdx.x] = 1;
            }""")
        out = np.zeros(64, np.int32)
        with pytest.raises(DeviceError, match="never fills"):
            run((1,), (64,), (out, np.True_))
        assert not out.any()
        run((1,), (64,), (out, np.False_))
        assert out.all()


LANE = np.arange(32)


class TestWarps:
    SHUFFLES = (
        (f"__shfl_sync({FULL}, x, 5)", np.full(32, 5)),
        (f"__shfl_sync({FULL}, x, 37)", np.full(32, 5)),
        (f"__shfl_sync({FULL}, x, 5, 8)", LANE // 8 * 8 + 5),
        (f"__shfl_up_sync({FULL}, x, 3)", np.where(LANE < 3, LANE, LANE - 3)),
        (f"__shfl_up_sync({FULL}, x, 3, 8)", np.where(LANE % 8 < 3, LANE, LANE - 3)),
        (f"__shfl_down_sync({FULL}, x, 30)", np.where(LANE < 2, LANE + 30, LANE)),
        (f"__shfl_down_sync({FULL}, x, 1, 4)", np.where(LANE % 4 == 3, LANE, LANE + 1)),
        (f"__shfl_xor_sync({FULL}, x, 16)", LANE ^ 16),
        (f"__shfl_xor_sync({FULL}, x, 8, 8)", np.where(LANE & 8, LANE ^ 8, LANE)),
        ("lane < 16 ? __shfl_sync(0xffffu, x, 3) : __shfl_sync(0xffff0000u, x, 20)", np.repeat([3, 20], 16)),
    )

    @pytest.mark.parametrize("k", range(len(SHUFFLES)))
    @pytest.mark.parametrize("type", DTYPES)
    def test_shuffles(self, k: int, type: str) -> None:
        calls, lanes = zip(*self.SHUFFLES, strict=True)
        np.testing.assert_array_equal(of_lanes(calls, k, types=tuple(DTYPES), type=type), 10 * lanes[k])

    def test_a_lane_that_takes_no_part_gives_nothing(self) -> None:
        out = of_lanes(["lane < 16 ? __shfl_sync(0xffffu, x, lane + 8) : 0"], 0, types=["double"], type="double")
        np.testing.assert_array_equal(out[:8], 10.0 * np.arange(8, 16))
        assert np.isnan(out[8:16]).all()

    VOTES = (
        (f"__ballot_sync({FULL}, lane % 2)", -0x55555556, 32),
        (f"__any_sync({FULL}, lane == 9)", 1, 32),
        (f"__any_sync({FULL}, 0)", 0, 32),
        (f"__all_sync({FULL}, lane < 32)", 1, 32),
        (f"__all_sync({FULL}, lane)", 0, 32),
        (f"__all_sync({FULL}, lane < 40)", 1, 40),  # of the second warp no more than eight lanes are there
    )

    @pytest.mark.parametrize("k", range(len(VOTES)))
    def test_votes(self, k: int) -> None:
        votes, answers, sizes = zip(*self.VOTES, strict=True)
        np.testing.assert_array_equal(of_lanes(votes, k, sizes[k]), answers[k])

    def test_sums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = kernel("""
            __global__ void run(double *out) {
                double x = 1.0 / (1 + threadIdx.x + 64 * blockIdx.x);
                for (int half = 16; half; half /= 2) x += __shfl_down_sync(0xffffffffu, x, half);
                if (threadIdx.x % 32 == 0) out[2 * blockIdx.x + threadIdx.x / 32] = x;
            }""")
        (found,) = results(run, monkeypatch, np.zeros(8))
        expected = (1.0 / np.arange(1, 257)).reshape(8, 32)
        while expected.shape[1] > 1:
            half = expected.shape[1] // 2
            expected = expected[:, :half] + expected[:, half:]
        np.testing.assert_array_equal(np.frombuffer(found), expected[:, 0])


class TestNumbers:
    VALUES = (
        ("__popc(0xf0f0u) + 100 * __popcll(1ull << 40 | 1)", 208),
        ("__ffs(0) + 10 * __ffs(8)", 40),
        ("__clz(1) + 100 * __clz(0)", 3231),
        ("__clzll(1) + 100 * __clzll(0)", 6463),
        ("__umulhi(0xffffffffu, 16u)", 15),
        ("__mulhi(-1, 16)", -1),
        ("(int)(__umul64hi(1ull << 63, 6))", 3),
        ("min(3, 5) + 10 * max(3ll, 5)", 53),
        ("__float_as_int(__uint_as_float(0x40490fdbu)) == __float_as_int(3.14159274f)", 1),
        ("(int)(__double_as_longlong(-2.0) >> 52)", -1024),
        ("__longlong_as_double(0x7ff0000000000000) == 1.0 / 0.0", 1),
        ("fma(1 + 0x1p-30, 1 - 0x1p-30, -1.0) == -0x1p-60", 1),
        ("(1 + 0x1p-30) * (1 - 0x1p-30) - 1.0 == 0", 1),
        ("fmaf(1 + 0x1p-13f, 1 - 0x1p-13f, -1.0f) == -0x1p-26f", 1),
        ("__fma_rn(2, 3, 4) + __dmul_rn(2, 3) + __dadd_rn(1, 2) + __dsub_rn(1, 2) + __drcp_rn(0.5)", 20),
        ("(int)(rsqrt(0.25) + sqrt(4.0f) + fabs(-3.0f))", 7),
        ("max(1.0, 0.0 / 0.0)", 1),
    )

    @pytest.mark.parametrize("k", range(len(VALUES)))
    def test_intrinsics(self, k: int) -> None:
        expressions, values = zip(*self.VALUES, strict=True)
        assert of_lanes(expressions, k, 1)[0] == values[k]

    SUM = "atomicAdd(out, (T)(1 + threadIdx.x));"

    @pytest.mark.parametrize("type", ["int", "unsigned int", "unsigned long long", "float", "double"])
    def test_atomic_sums(self, monkeypatch: pytest.MonkeyPatch, type: str) -> None:
        run = one_of([self.SUM], 0, ("int", "unsigned int", "unsigned long long", "float", "double"), type)
        found = results(run, monkeypatch, np.zeros(1, DTYPES[type]), grid=(1,))
        assert found == {np.array(2080, DTYPES[type]).tobytes()}

    UPDATES = (
        ("atomicMax(out, (T)threadIdx.x)", 63),
        ("atomicMin(out, -(T)threadIdx.x)", -63),
        ("atomicOr(out, (T)1 << threadIdx.x % 7)", 127),
        ("atomicExch(out, (T)5)", 5),
        ("for (T old = *out, seen; (seen = atomicCAS(out, old, old + 2)) != old; old = seen) {}", 128),
    )

    @pytest.mark.parametrize("k", range(len(UPDATES)))
    def test_atomics(self, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
        updates, values = zip(*self.UPDATES, strict=True)
        found = results(one_of([f"{update};" for update in updates], k), monkeypatch, np.zeros(1, np.int32), grid=(1,))
        assert found == {np.int32(values[k]).tobytes()}


FILL = "__global__ void run(double *out, long long n) { for (long long i = 0; i < n; ++i) out[i] = 7; }"


class TestMemory:
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
        ("if (threadIdx.x == 9) out[1ll << 50] = 1; __syncthreads();", r"thread \(9, 0, 0\) reads or writes where"),
        ("if (threadIdx.x == 9) out[0] = *(T *)nullptr;", "where no memory is"),
        ("volatile char room[1 << 18]; room[out[0]] = room[1]; out[0] = room[0];", "its stack is full"),
    )

    @pytest.mark.parametrize("k", range(len(FAULTS)))
    def test_faults_of_a_thread_are_reported(self, k: int) -> None:
        bodies, reports = zip(*self.FAULTS, strict=True)
        run, out = one_of(bodies, k), np.zeros(1, np.int32)
        with pytest.raises(DeviceError, match=reports[k]):
            run((2,), (16,), (out,))
        assert out[0] == 0
        run_again = one_of(["__syncthreads(); out[0] = threadIdx.x;"], 0)
        run_again((1,), (1,), (out,))

    def test_nothing_is_left_in_shared_memory(self) -> None:
        run = kernel(
            """
            template <typename T>
            __global__ void run(T *out) {
                __shared__ T there[2];
                out[blockIdx.x] = there[1];
                there[1] = 5;
            }""",
            "run<double>",
        )
        out = np.zeros(3)
        run((3,), (1,), (out,))
        assert np.isnan(out).all()

    @pytest.mark.parametrize("index", [-1, -1000, 20, 21, 5000])
    def test_writing_out_of_bounds_is_reported(self, index: int) -> None:
        run = kernel("__global__ void run(const int *in, int *out, long long at) { out[at] = in[0]; }")
        ones, out = np.ones(3, np.int32), np.zeros(20, np.int32)
        run((1,), (1,), (ones, out, np.int64(19)))
        assert out[19] == 1
        place = rf"4 bytes out of bounds around argument 1 .* {4 * index} bytes from its start"
        with pytest.raises(DeviceError, match=place):
            run((1,), (1,), (ones, out, np.int64(index)))

    def test_reading_out_of_bounds_poisons(self) -> None:
        run = kernel("__global__ void run(const double *in, double *out) { out[0] = in[-1]; out[1] = in[3]; }")
        out = np.zeros(2)
        run((1,), (1,), (np.ones(3), out))
        assert np.isnan(out).all()

    def test_strides_are_kept(self) -> None:
        run = kernel(
            "__global__ void run(double *out, int step) { out[threadIdx.x * (long long)step] = threadIdx.x; }"
        )
        out = np.full((9, 5), -1.0)
        run((1,), (9,), (out[:, 2], np.int32(5)))
        expected = np.full((9, 5), -1.0)
        expected[:, 2] = range(9)
        np.testing.assert_array_equal(out, expected)
        run((1,), (9,), (out[::-1, 3][8:], np.int32(0)))
        with pytest.raises(DeviceError, match="8 bytes from its start"):  # between the entries of the view
            run((1,), (2,), (out[:, 2], np.int32(1)))

    def test_reversed_arrays_are_given_from_their_first_entry(self) -> None:
        run = kernel("__global__ void run(double *out) { out[-(int)threadIdx.x] = threadIdx.x; }")
        out = np.zeros(6)
        run((1,), (6,), (out[::-1],))
        np.testing.assert_array_equal(out, np.arange(6)[::-1])

    def test_aliases_stay_aliases(self) -> None:
        run = kernel("""
            __global__ void run(const double *in, double *out) {
                const double x = in[threadIdx.x];
                __syncthreads();
                out[threadIdx.x] = 2 * x;
                __syncthreads();
                if (threadIdx.x == 0) out[0] += in[1];
            }""")
        both = np.arange(1.0, 6.0)
        run((1,), (4,), (both[:4], both[1:]))
        np.testing.assert_array_equal(both, [1, 4, 4, 6, 8])  # in[1] is out[0], which was 2

    def test_a_constant_stays(self) -> None:
        values = np.ones(3)
        values.setflags(write=False)
        run = kernel("__global__ void run(const double *in, double *out) { out[0] = in[0]; }")
        out = np.zeros(1)
        run((1,), (1,), (np.broadcast_to(values[:1], (5, 5)), out))
        assert out[0] == 1

    def test_what_is_absent_or_empty_is_null(self) -> None:
        run = kernel("__global__ void run(const double *in, bool *out) { *out = !in; }")
        out = np.zeros(1, np.bool_)
        for absent, answer in ((NOTHING, True), (np.zeros(0), True), (np.zeros(1), False)):
            run((1,), (1,), (absent, out))
            assert out[0] == answer

    def test_allocations_are_aligned_as_on_a_device(self) -> None:
        run = kernel("__global__ void run(const float *in, int *out) { *out = (int)((unsigned long long)in % 256); }")
        out = np.zeros(1, np.int32)
        for first in (0, 1, 70):
            run((1,), (1,), (np.zeros(99, np.float32)[first:], out))
            assert out[0] == 4 * first % 256

    def test_shared_memory_of_any_size(self) -> None:
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
        with pytest.raises(DeviceError, match="wrote past its 64 bytes of dynamic shared memory"):
            run((3,), (8,), (out, np.int32(1)), shared_mem=64)
        with pytest.raises(DeviceError, match="wrote before its dynamic"):
            run((3,), (8,), (out, np.int32(-1)), shared_mem=64)
        with pytest.raises(DeviceError, match="max_dynamic_shared_size_bytes"):
            run((3,), (8,), (out, np.int32(0)), shared_mem=1 << 17)
        run.max_dynamic_shared_size_bytes = 1 << 17
        run((3,), (8,), (out, np.int32(0)), shared_mem=1 << 17)


class TestArguments:
    PARAMETERS = "double *a, int b, const unsigned char *c, unsigned long long d, float e, bool f, const Half *g"
    GOOD = (
        *(np.zeros(1), np.int32(1), np.zeros(1, np.bool_), np.uint64(1), np.float32(1), np.True_),
        np.zeros(1, np.uint16),
    )

    @pytest.fixture
    def run(self) -> Kernel:
        half = "struct Half { unsigned short bits; };"
        return kernel(f"{half}\n__global__ void run({self.PARAMETERS}) {{ *a = b + *c + d + e + f + g->bits; }}")

    def test_those_of_the_parameters_types_are_taken(self, run: Kernel) -> None:
        run((1,), (1,), self.GOOD)
        assert self.GOOD[0][0] == 4
        run((1,), (1,), (*self.GOOD[:2], np.zeros(1, np.uint8), *self.GOOD[3:6], np.zeros(1, np.float16)))

    @pytest.mark.parametrize(
        ("number", "wrong", "told"),
        [
            (
                0,
                np.zeros(1, np.float32),
                r"double\*: expected a numpy array of float64, or NOTHING, got one of float32",
            ),
            (0, np.zeros(1, ">f8"), "expected a numpy array of float64"),
            (0, 0, r"got 0 of type int"),
            (0, None, "got None of type NoneType"),
            (0, [1.0], "of type list"),
            (0, np.intp(8), "got np.int64"),
            (0, np.frombuffer(bytearray(9), np.float64, 1, 1), "not aligned"),
            (0, np.broadcast_to(np.zeros(1), (3,)), "read-only"),
            (1, 1, r"int: expected a numpy scalar of int32, got 1 of type int"),
            (1, np.int64(1), "got np.int64"),
            (1, np.uint32(1), "got np.uint32"),
            (1, np.zeros((), np.int32), "got array"),
            (1, NOTHING, "got np.int64"),
            (2, np.zeros(1, np.int8), "uint8 or bool"),
            (3, np.int64(1), "unsigned long long"),
            (4, np.float64(1), "float32"),
            (5, True, "numpy scalar of bool"),
            (6, np.zeros(1, np.int16), "uint16 or float16"),
        ],
    )
    def test_others_are_refused(self, run: Kernel, number: int, wrong: Any, told: str) -> None:
        with pytest.raises(TypeError, match=f"^argument {number} of run is .*{told}"):
            run((1,), (1,), (*self.GOOD[:number], wrong, *self.GOOD[number + 1 :]))

    @pytest.mark.parametrize("count", [0, 6, 8])
    def test_so_is_another_number_of_them(self, run: Kernel, count: int) -> None:
        with pytest.raises(TypeError, match=f"run takes 7 arguments, got {count}"):
            run((1,), (1,), (self.GOOD * 2)[:count])

    def test_so_are_parameters_that_it_does_not_know(self) -> None:
        run = kernel("struct Pair { int a, b; };\n__global__ void run(Pair *pairs) {}")
        with pytest.raises(TypeError, match=r"no parameters of type Pair\*"):
            run((1,), (1,), (np.zeros(2, np.int32),))

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
    def test_so_are_launches_that_no_device_takes(self, grid: Any, block: Any, shared: int, told: str) -> None:
        run = kernel(FILL)
        with pytest.raises(DeviceError, match=told):
            run(grid, block, (np.zeros(1), np.int64(1)), shared_mem=shared)

    def test_so_are_blocks_beyond_the_bounds_of_the_kernel(self) -> None:
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

    def test_a_source_that_does_not_compile_says_where(self) -> None:
        with pytest.raises(RuntimeError, match=r"wrong\.cu:2:\d+: error"):
            compiled("__global__ void run(int *out) {\n*out = missing; }", ("run",), "wrong.cu")


class TestOnHost:
    @pytest.fixture
    def source(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
        (tmp_path / "own.cu").write_text(
            '#include "own.cuh"\n'
            "template <typename T>\n__global__ void __launch_bounds__(64) scale(T *x, T by) { scaled(x, by); }\n"
        )
        (tmp_path / "own.cuh").write_text(
            "template <typename T>\n__device__ void scaled(T *x, T by) { x[blockIdx.x * 64 + threadIdx.x] *= by; }\n"
        )
        monkeypatch.setattr(cuda_source, "FOLDER", tmp_path)
        monkeypatch.setitem(cuda_source.KERNELS, "own", {"scale": (("float",), ("double",))})
        return "own"

    def test_launches_run_here(self, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        with monkeypatch.context() as patch:
            xp = on_host(patch, 3)
            assert (cuda_source.namespace(), emulator.order) == (xp, 3)
            for types, dtype in ((["float"], np.float32), (["double"], np.float64)):
                x = xp.ones(128, dtype)
                cuda_source.launch(source, "scale", types, (2,), 64, [x, dtype(3)])
                cuda_source.launch(source, "scale", types, (2, 0), 64, [])  # nothing to do
                np.testing.assert_array_equal(x, 3)
            with pytest.raises(LookupError, match=r"scale<int> of own\.cu is not among"):
                cuda_source.launch(source, "scale", ["int"], (1,), 64, [])
        assert emulator.order == 1

    def test_much_shared_memory_is_asked_for(self, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        xp = on_host(monkeypatch)
        x = xp.ones(64)
        cuda_source.launch(source, "scale", ["double"], (1,), 64, [x, np.float64(2)], shared=200_000)
        assert x[0] == 2

    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
    def test_memory_that_nobody_has_written_is_nan(self, shape: tuple[int, ...]) -> None:
        xp = Host()
        for array in (xp.empty(shape), xp.empty(shape, order="F"), xp.empty_like(np.zeros(shape).T)):
            assert np.isnan(array).all()
            assert array.dtype == np.float64
        assert (xp.empty(shape, np.int64) == -1).all()
        assert xp.asnumpy(xp.zeros(3)).tolist() == [0, 0, 0]
