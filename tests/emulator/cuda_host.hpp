// CUDA C++ as a host compiler understands it: one block at a time, its threads as fibers.
//
// A fiber runs until it meets a barrier of its block or a collective of its warp. These let go when every thread
// that has not ended and takes part has come, all from the same line; a barrier that cannot fill is reported. The
// seed of a launch decides the order of the blocks, and which of the threads that can go on does so next. Shared
// memory, which is thread-local memory here because that lies in one piece, is filled with NaN before each block.

#include <cxxabi.h>
#include <link.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))

// ---- types ----------------------------------------------------------------------------------------------------------

struct uint3 {
    unsigned int x, y, z;
};

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

#define EMULATED_VECTORS(name, type)                                                                                \
    struct alignas(2 * sizeof(type)) name##2 {                                                                      \
        type x, y;                                                                                                  \
    };                                                                                                              \
    struct alignas(16) name##4 {                                              \
        type x, y, z, w;                                                                                            \
    };                                                                                                              \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATED_VECTORS(uint, unsigned int)
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(double, double)

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

// ---- fibers ---------------------------------------------------------------------------------------------------------

namespace emulated {

constexpr unsigned int most_threads = 1024;
constexpr size_t most_shared = 232448, shared_zone = 16384;
constexpr size_t page = 65536, stack_bytes = 2 * page;  // a page of any machine divides it

enum Collective { sync_threads, sync_threads_and, sync_threads_or, sync_warp, shuffle, vote };
const char *const collective_names[] = {"__syncthreads", "__syncthreads_and", "__syncthreads_or",
                                        "__syncwarp",    "a shuffle",         "a vote"};

struct Thread {
    bool ended, waits;
    Collective at;
    int line;
    unsigned int mask;  // the lanes that are waited for
    int source;         // the lane that a shuffle reads
    unsigned long long value, result;
};

struct Warp {
    unsigned int alive, waiting;
};

struct Fiber {
    void *place[5];
    bool started;
    void *stack;
};

struct Entry {
    void (*kernel)();
    void (*call)(void (*)(), void **);
    std::string signature;
    long long bound;
};

extern Entry *const entries;  // the kernels that are asked for: defined after the source

static Thread threads[most_threads];
static Warp warps[most_threads / 32];
static Fiber fibers[most_threads];
static void *scheduler[5];
static uint3 places[most_threads];  // in their block
static unsigned int current, alive, at_barrier;
static std::vector<unsigned int> ready;  // threads that can go on
static const Entry *entry;
static void **arguments;
static unsigned long long seed, state;
static std::string failure;
alignas(256) static unsigned char shared_memory[shared_zone + most_shared + shared_zone];  // of any size
static unsigned char *static_memory;
static size_t static_bytes;

inline unsigned char *dynamic_shared() { return shared_memory + shared_zone; }

// Find the thread-local memory of this library.
static int find_static_memory(dl_phdr_info *library, size_t, void *) {
    bool here = false;
    const ElfW(Phdr) *local = nullptr;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const ElfW(Phdr) &part = library->dlpi_phdr[i];
        here |= part.p_type == PT_LOAD && (size_t)&seed - library->dlpi_addr - part.p_vaddr < part.p_memsz;
        if (part.p_type == PT_TLS) local = &part;
    }
    if (!here) return 0;
    static_memory = (unsigned char *)library->dlpi_tls_data;
    static_bytes = local && static_memory ? local->p_memsz : 0;
    return 1;
}

inline unsigned long long random_below(unsigned long long n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (unsigned __int128)state * n >> 64;
}

// Nothing of what other fibers may have written is known across these two.
__attribute__((noipa)) static void leave() {
    if (!__builtin_setjmp(fibers[current].place)) __builtin_longjmp(scheduler, 1);
}

static void live() {
    for (;;) {
        entry->call(entry->kernel, arguments);
        threads[current].ended = true;
        leave();
    }
}

__attribute__((noipa)) static void resume() {
    Fiber &fiber = fibers[current];
    if (__builtin_setjmp(scheduler)) return;
    if (fiber.started) __builtin_longjmp(fiber.place, 1);
    if (!fiber.stack) {  // the lowest page catches what overflows
        fiber.stack = mmap(nullptr, page + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fiber.stack == MAP_FAILED || mprotect(fiber.stack, page, PROT_NONE)) abort();
    }
    fiber.started = true;
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = (char *)fiber.stack + page;
    context.uc_stack.ss_size = stack_bytes;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    setcontext(&context);
}

static void let_go(unsigned int thread) {
    threads[thread].waits = false;
    ready.push_back(thread);
}

static void fail(const std::string &what) {
    if (failure.empty()) failure = what;
}

static void try_block() {
    if (!alive || at_barrier != alive) return;
    const unsigned int n = blockDim.x * blockDim.y * blockDim.z;
    unsigned long long count = 0;
    const Thread *first = nullptr;
    for (unsigned int i = 0; i < n; ++i) {
        if (threads[i].ended) continue;
        if (!first) first = &threads[i];
        if (threads[i].at != first->at || threads[i].line != first->line) return;  // will be reported: nobody goes on
        count += threads[i].value;
    }
    const unsigned long long results[] = {0, count == alive, count != 0};
    for (unsigned int i = 0; i < n; ++i) {
        if (threads[i].ended) continue;
        threads[i].result = results[threads[i].at];
        let_go(i);
    }
    at_barrier = 0;
}

static void try_warp(unsigned int w, const Thread &first) {
    Warp &warp = warps[w];
    const unsigned int mask = first.mask & warp.alive;
    if ((mask & warp.waiting) != mask) return;
    Thread *const lanes = threads + 32 * w;
    unsigned int votes = 0;
    for (int i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        if (lanes[i].mask != first.mask || lanes[i].at != first.at || lanes[i].line != first.line) return;
        votes |= (unsigned int)(lanes[i].value & 1) << i;
    }
    for (int i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        if (lanes[i].at == shuffle)  // a lane that takes no part has nothing to give
            lanes[i].result = mask >> lanes[i].source & 1 ? lanes[lanes[i].source].value : ~0ull;
        else
            lanes[i].result = votes;
        let_go(32 * w + i);
    }
    warp.waiting &= ~mask;
}

static unsigned long long block_barrier(Collective at, int line, bool predicate = false) {
    Thread &thread = threads[current];
    thread.waits = true, thread.at = at, thread.line = line, thread.value = predicate;
    ++at_barrier;
    try_block();
    leave();
    return thread.result;
}

static unsigned long long warp_barrier(
    Collective at, int line, unsigned int mask, unsigned long long value = 0, int source = 0) {
    Thread &thread = threads[current];
    thread.waits = true, thread.at = at, thread.line = line, thread.value = value;
    thread.mask = mask, thread.source = source;
    const unsigned int w = current / 32, lane = current % 32;
    if (!(mask >> lane & 1))
        fail("a thread calls " + std::string(collective_names[at]) + " of line " + std::to_string(line) +
             " with a mask that does not name it");
    warps[w].waiting |= 1u << lane;
    try_warp(w, thread);
    leave();
    return thread.result;
}

static void end_thread() {
    const unsigned int w = current / 32;
    --alive;
    warps[w].alive &= ~(1u << current % 32);
    try_block();
    for (int i = 0; i < 32; ++i)
        if (warps[w].waiting >> i & 1) try_warp(w, threads[32 * w + i]);
}

static std::string who_waits(unsigned int n) {
    std::string told;
    std::vector<bool> counted(n);
    for (unsigned int i = 0; i < n; ++i) {
        if (threads[i].ended || counted[i]) continue;
        unsigned int count = 0;
        for (unsigned int k = i; k < n; ++k) {
            const Thread &a = threads[i], &b = threads[k];
            if (b.ended || a.at != b.at || a.line != b.line) continue;
            counted[k] = true;
            ++count;
        }
        told += (told.empty() ? "" : ", ") + std::to_string(count) + " of " + std::to_string(n) + " threads wait at " +
                collective_names[threads[i].at] + " of line " + std::to_string(threads[i].line);
    }
    return told + ", " + std::to_string(n - alive) + " have ended";
}

static void run_block(size_t shared) {
    const unsigned int n = blockDim.x * blockDim.y * blockDim.z;
    memset(shared_memory, 0xff, shared_zone + shared + shared_zone);
    memset(static_memory, 0xff, static_bytes);
    memset(threads, 0, n * sizeof(Thread));
    for (unsigned int w = 0; 32 * w < n; ++w) warps[w] = {n - 32 * w < 32 ? (1u << n % 32) - 1 : ~0u, 0};
    alive = n;
    at_barrier = 0;
    ready.clear();
    for (unsigned int i = n; i-- > 0;) ready.push_back(i);
    while (!ready.empty() && failure.empty()) {
        if (seed) std::swap(ready[random_below(ready.size())], ready.back());
        current = ready.back();
        ready.pop_back();
        threadIdx = places[current];
        resume();
        if (threads[current].ended) end_thread();
    }
    if (alive && failure.empty()) fail("a barrier that never fills: " + who_waits(n));
    for (unsigned int i = 0; i < n; ++i)
        if (!threads[i].ended) fibers[i].started = false;
    for (size_t i = 0; i < shared_zone; ++i) {
        if (shared_memory[i] != 0xff) fail("wrote before its dynamic shared memory");
        if (shared_memory[shared_zone + shared + i] != 0xff)
            fail("wrote past its " + std::to_string(shared) + " bytes of dynamic shared memory");
    }
}

static unsigned long long common_divisor(unsigned long long a, unsigned long long b) {
    return b ? common_divisor(b, a % b) : a;
}

static void run_grid(size_t shared) {
    const unsigned long long n = (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
    for (unsigned int i = 0; i < blockDim.x * blockDim.y * blockDim.z; ++i)
        places[i] = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    static thread_local volatile char touched;  // such memory is there once some of it is used
    touched = 1;
    dl_iterate_phdr(find_static_memory, nullptr);
    state = seed * 0x9e3779b97f4a7c15ull | 1;
    for (int i = 0; i < 8; ++i) random_below(1);
    unsigned long long block = seed ? random_below(n) : 0, step = seed ? 1 + random_below(n) : 1;
    while (common_divisor(step, n) != 1) ++step;  // so that every block comes once
    for (unsigned long long i = 0; i < n && failure.empty(); ++i, block = (block + step) % n) {
        blockIdx = {(unsigned int)(block % gridDim.x), (unsigned int)(block / gridDim.x % gridDim.y),
                    (unsigned int)(block / gridDim.x / gridDim.y)};
        run_block(shared);
    }
    if (!failure.empty())
        failure = "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                  std::to_string(blockIdx.z) + "): " + failure;
}

template <typename T>
std::string name_of() {
    char *const name = abi::__cxa_demangle(typeid(T).name(), nullptr, nullptr, nullptr);
    const std::string result = name;
    free(name);
    return result;
}

template <typename... P, size_t... I>
void call_with(void (*kernel)(P...), void **values, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<P> *)values[I]...);
}

template <typename... P>
Entry entry_of(void (*kernel)(P...), long long bound) {
    std::string signature;
    ((signature += name_of<P>() + ";"), ...);
    const auto call = [](void (*any)(), void **values) {
        call_with((void (*)(P...))any, values, std::index_sequence_for<P...>());
    };
    return {(void (*)())kernel, call, signature, bound};
}

template <typename T>
T same_bits(unsigned long long bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T>
T shuffled(unsigned int mask, T value, int source, int line) {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA shuffles no such type");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return same_bits<T>(warp_barrier(shuffle, line, mask, bits, source));
}

inline int lane() { return current % 32; }

static std::string this_thread() {
    return "thread (" + std::to_string(threadIdx.x) + ", " + std::to_string(threadIdx.y) + ", " +
           std::to_string(threadIdx.z) + ") ";
}

// What the compiler checks: a thread that fails stays where it is.
struct Place {
    const char *file;
    uint32_t line, column;
};

static void fail_at(const Place *place, const char *what) {
    fail(this_thread() + what + " in line " + std::to_string(place->line) + " of " + place->file);
    leave();
}

extern "C" void __ubsan_handle_out_of_bounds(Place *place, void *) { fail_at(place, "leaves the bounds of an array"); }
extern "C" void __ubsan_handle_shift_out_of_bounds(Place *place, void *, void *) {
    fail_at(place, "shifts by more bits than there are");
}
extern "C" void __ubsan_handle_divrem_overflow(Place *place, void *, void *) { fail_at(place, "divides by zero"); }
extern "C" void __ubsan_handle_type_mismatch_v1(Place *place, void *) {
    fail_at(place, "reads or writes at an address that is no multiple of the size of what it accesses");
}

// And what the machine finds, while a kernel runs.
class Watch {
    struct sigaction segmentation, bus;
    stack_t stack;

    static void found(int) {
        fail(this_thread() + "reads or writes where no memory is, or its stack is full");
        __builtin_longjmp(scheduler, 1);
    }

public:
    Watch() {
        static char room[page];
        const stack_t here = {room, 0, sizeof room};
        sigaltstack(&here, &stack);
        struct sigaction action = {};
        action.sa_handler = found;
        action.sa_flags = SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &segmentation);
        sigaction(SIGBUS, &action, &bus);
    }
    ~Watch() {
        sigaction(SIGSEGV, &segmentation, nullptr);
        sigaction(SIGBUS, &bus, nullptr);
        sigaltstack(&stack, nullptr);
    }
};

#define EMULATED_EXPORT extern "C" __attribute__((visibility("default")))

EMULATED_EXPORT const char *emulated_signature(int k) { return entries[k].signature.c_str(); }

EMULATED_EXPORT long long emulated_bound(int k) { return entries[k].bound; }

// What went wrong, or nothing.
EMULATED_EXPORT const char *emulated_run(
    int k, const unsigned int *grid, const unsigned int *block, size_t shared, void **values,
    unsigned long long order) {
    gridDim = dim3(grid[0], grid[1], grid[2]);
    blockDim = dim3(block[0], block[1], block[2]);
    entry = &entries[k];
    arguments = values;
    seed = order;
    failure.clear();
    {
        const Watch watch;
        run_grid(shared);
    }
    return failure.c_str();
}

}  // namespace emulated

// ---- barriers and collectives ---------------------------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) { emulated::block_barrier(emulated::sync_threads, line); }
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return (int)emulated::block_barrier(emulated::sync_threads_and, line, predicate);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return (int)emulated::block_barrier(emulated::sync_threads_or, line, predicate);
}

inline void __syncwarp(unsigned int mask = ~0u, int line = __builtin_LINE()) {
    emulated::warp_barrier(emulated::sync_warp, line, mask);
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate, int line = __builtin_LINE()) {
    return (unsigned int)emulated::warp_barrier(emulated::vote, line, mask, predicate != 0);
}
inline int __any_sync(unsigned int mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) != 0;
}
// Small numbers are promoted to int, as CUDA does: +value.
template <typename T>
auto __shfl_xor_sync(unsigned int mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
    const int lane = emulated::lane(), source = lane ^ bits;
    return emulated::shuffled(mask, +value, source >= (lane & -width) + width ? lane : source, line);
}

// ---- atomics: the types that CUDA has, no more ----------------------------------------------------------------------

#define EMULATED_ATOMIC(name, type, result)                                                                         \
    inline type name(type *address, type value) {                                                                   \
        const type old = *address;                                                                                  \
        *address = result;                                                                                          \
        return old;                                                                                                 \
    }

EMULATED_ATOMIC(atomicAdd, int, old + value)
EMULATED_ATOMIC(atomicAdd, unsigned int, old + value)
EMULATED_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATED_ATOMIC(atomicMin, int, old < value ? old : value)
EMULATED_ATOMIC(atomicOr, unsigned int, old | value)

// ---- numbers --------------------------------------------------------------------------------------------------------

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return fmin((T)a, (T)b);
    return (T)b < (T)a ? (T)b : (T)a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return fmax((T)a, (T)b);
    return (T)a < (T)b ? (T)b : (T)a;
}

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline float __uint_as_float(unsigned int x) { return emulated::same_bits<float>(x); }
inline float __int_as_float(int x) { return emulated::same_bits<float>((unsigned int)x); }
inline double __longlong_as_double(long long x) { return emulated::same_bits<double>((unsigned long long)x); }
inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline long long __double_as_longlong(double x) {
    long long bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
