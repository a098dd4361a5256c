// CUDA's language for g++: one block at a time, and in it one fiber for each thread. A thread runs until it waits for
// others, and a warp until it waits for the block, so code between two barriers is never interrupted: if a barrier is
// missing, results differ with the order of threads.

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <ucontext.h>

using std::copysign;
using std::fabs;
using std::floor;

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __shared__ static __attribute__((section("pserver_shared")))

struct PserverShimIndex {
    unsigned x, y, z;
};
static PserverShimIndex threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

template <typename To, typename From> inline To pserver_shim_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "the same bits");
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float a) {
    return pserver_shim_bits<unsigned>(a);
}
inline float __uint_as_float(unsigned a) {
    return pserver_shim_bits<float>(a);
}
inline long long __double_as_longlong(double a) {
    return pserver_shim_bits<long long>(a);
}
inline double __longlong_as_double(long long a) {
    return pserver_shim_bits<double>(a);
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
inline double __dadd_rn(double a, double b) {
    return a + b;
}
inline double __dsub_rn(double a, double b) {
    return a - b;
}
inline double __dmul_rn(double a, double b) {
    return a * b;
}
inline double __ddiv_rn(double a, double b) {
    return a / b;
}
inline double __dsqrt_rn(double a) {
    return sqrt(a);
}
inline float __double2float_rn(double a) {
    return (float)a;
}
// The nearest value is correct, or one step too far from zero.
inline float __double2float_rz(double a) {
    float nearest = (float)a;
    return fabs((double)nearest) > fabs(a) ? nextafterf(nearest, 0.0f) : nearest;
}
inline int __popc(unsigned a) {
    return __builtin_popcount(a);
}

[[noreturn]] inline void pserver_shim_stop(const char* why, int line) {
    fprintf(stderr, "pserver shim: %s, line %d of the module, block %u %u\n", why, line, blockIdx.x, blockIdx.y);
    abort();
}

// A thread of the block that runs.
enum PserverShimWait { RUNS, AT_BARRIER, AT_WARP, ENDED };
struct PserverShimThread {
    jmp_buf resume;
    PserverShimWait wait;
    int line;
    unsigned given;
    bool is_begun;
};
enum { SHIM_THREADS = 1024, SHIM_STACK_BYTES = 64 * 1024, SHIM_SITES = 64 };
static PserverShimThread pserver_shim_threads[SHIM_THREADS];
static jmp_buf pserver_shim_scheduler;
static int pserver_shim_dropped;
static int pserver_shim_sites[SHIM_SITES], pserver_shim_site_count;

inline void pserver_shim_wait(PserverShimWait wait, int line, unsigned given) {
    unsigned self = threadIdx.x;
    PserverShimThread& thread = pserver_shim_threads[self];
    thread.wait = wait, thread.line = line, thread.given = given;
    if (_setjmp(thread.resume) == 0) {
        _longjmp(pserver_shim_scheduler, 1);
    }
    threadIdx.x = self;
}

// Waits for the whole block, unless this is the one that a test left out.
inline void pserver_shim_barrier(int line) {
    int site = 0;
    while (site < pserver_shim_site_count && pserver_shim_sites[site] != line) {
        site++;
    }
    if (site == pserver_shim_site_count && site < SHIM_SITES) {
        pserver_shim_sites[pserver_shim_site_count++] = line;
    }
    if (line != pserver_shim_dropped) {
        pserver_shim_wait(AT_BARRIER, line, 0);
    }
}

inline unsigned pserver_shim_match(unsigned mask, unsigned value, int line) {
    if (mask != 0xffffffffu) {
        pserver_shim_stop("a part of a warp", line);
    }
    pserver_shim_wait(AT_WARP, line, value);
    unsigned peers = 0, first = threadIdx.x / 32 * 32;
    for (unsigned lane = 0; lane < 32; lane++) {
        peers |= (unsigned)(pserver_shim_threads[first + lane].given == value) << lane;
    }
    // The values of the other lanes stay until all lanes have read them.
    pserver_shim_wait(AT_WARP, line, value);
    return peers;
}

#define __syncthreads() pserver_shim_barrier(__LINE__)
#define __syncwarp() pserver_shim_wait(AT_WARP, __LINE__, 0)
#define __match_any_sync(mask, value) pserver_shim_match(mask, value, __LINE__)

typedef void (*PserverShimCall)(const void*);
struct PserverShimKernel {
    const char* name;
    PserverShimCall call;
};
template <typename Arguments, void (*KERNEL)(const Arguments)> void pserver_shim_call(const void* arguments) {
    KERNEL(*(const Arguments*)arguments);
}
#line 1 "module"
