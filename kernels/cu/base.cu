// Types, argument structures and memory access of all kernels. Includes no header, neither of NVRTC nor of g++.
//
// The structures mirror kernels/src/cuda/arguments.rs, which documents their fields.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { GRADIENTS_MAX = 64, STATES_MAX = 8, NUMBERS_MAX = 256 };
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, WORD, LONG };
enum { MERGE_SUM, MERGE_ADD, MERGE_SCALE };

struct UpdateArguments {
    u64 elements, weights, states[STATES_MAX], sum, scalars, skip, copy;
    u32 count, gradient_kind, copy_kind, merge;
    u64 gradients[GRADIENTS_MAX];
    u64 numbers[NUMBERS_MAX];
};

struct SquaresArguments {
    u64 values, elements, squares;
};

struct TotalArguments {
    u64 squares, count, total;
};

struct FiniteArguments {
    u64 elements, flag;
    u32 count, kind;
    u64 gradients[GRADIENTS_MAX];
};

struct CastArguments {
    u64 elements, from, into;
    u32 from_kind, into_kind;
};

struct SortArguments {
    u64 pairs, keys, places, keys_after, places_after, counts, unique;
    u32 shift, reserved;
};

struct ScanArguments {
    u64 counts, count;
};

struct RowsArguments {
    u64 unique, keys, starts, places, slots, records, stride, state_stride, scalars, skip;
    u32 width, count, gradient_kind, reserved;
    u32 firsts[GRADIENTS_MAX];
    u64 gradients[GRADIENTS_MAX];
};

struct ScalarCode {
    u32 operation, operands[3];
    double value;
};

struct ScalarValues {
    double rate, count, scale, clip_norm;
};

struct ScalarsArguments {
    u64 values, total, skip, code, places, scalars;
    u32 operations, used, kind, advances;
};

static_assert(sizeof(UpdateArguments) == 2688 && sizeof(RowsArguments) == 864, "as arguments.rs has them");
static_assert(sizeof(FiniteArguments) == 536 && sizeof(SortArguments) == 64, "as arguments.rs has them");
static_assert(sizeof(ScalarCode) == 24 && sizeof(ScalarsArguments) == 64, "as arguments.rs has them");

template <typename T> __device__ __forceinline__ T* at(u64 address) {
    return (T*)address;
}

// The numbers of a launch, by place: in the device's memory, where a kernel before this one computed them, else in the
// argument itself. The two loads differ, so that the compiler does not make one of them that could be from anywhere.
#ifdef __CUDA_ARCH__
template <typename T> __device__ __forceinline__ T of_device(u64 address, int place) {
    return __ldg(at<const T>(address) + place);
}
#else
template <typename T> T of_device(u64 address, int place) {
    return at<const T>(address)[place];
}
#endif
template <typename T> struct NumbersOf {
    const UpdateArguments& a;
    __device__ __forceinline__ T operator()(int place) const {
        T number = ((const T*)a.numbers)[place];
        // Without the hint some rules need registers that they have not.
        if (__builtin_expect(a.scalars != 0, 0)) {
            number = of_device<T>(a.scalars, place);
        }
        return number;
    }
};

__device__ __forceinline__ bool is_skipped(u64 skip) {
    return skip != 0 && *at<const u32>(skip) != 0;
}

// The elements of one memory access of a thread: 16 bytes.
template <typename T> struct Pack {
    enum { LENGTH = 16 / sizeof(T) };
    T of[LENGTH];
};

// The half-precision elements that widen to one pack, in their order in memory.
template <typename T> struct HalfPack {
    u32 of[Pack<T>::LENGTH / 2];
};

// Sums in the parameter's own type: floats round to nearest even, whole numbers wrap.
__device__ __forceinline__ float plus(float a, float b) {
    return __fadd_rn(a, b);
}
__device__ __forceinline__ double plus(double a, double b) {
    return __dadd_rn(a, b);
}
__device__ __forceinline__ u32 plus(u32 a, u32 b) {
    return a + b;
}
__device__ __forceinline__ u64 plus(u64 a, u64 b) {
    return a + b;
}
__device__ __forceinline__ float times(float a, float b) {
    return __fmul_rn(a, b);
}
__device__ __forceinline__ double times(double a, double b) {
    return __dmul_rn(a, b);
}

__device__ __forceinline__ float widen_brain(u32 bits) {
    return __uint_as_float(bits << 16);
}

#ifdef __CUDA_ARCH__
// Instructions of the device: widening is exact, narrowing rounds to nearest even; both include denormals.
__device__ __forceinline__ float widen_half(u32 bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((u16)bits));
    return wide;
}
__device__ __forceinline__ u32 nearest_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ u32 nearest_brain(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#else
// Exact, denormals included: the shifted bits are the value times 2^-112.
__device__ __forceinline__ float widen_half(u32 bits) {
    u32 magnitude = (bits & 0x7fff) << 13;
    u32 finite = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), __uint_as_float((127 + 112) << 23)));
    u32 wide = (0x7c00u << 13) <= magnitude ? magnitude | 0x7f800000u : finite;
    return __uint_as_float((bits & 0x8000) << 16 | wide);
}

// Rounds to nearest even.
__device__ __forceinline__ u32 nearest_brain(float value) {
    u32 bits = __float_as_uint(value);
    bool is_nan = 0x7f800000u < (bits & 0x7fffffffu);
    return is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 nearest_half(float value) {
    u32 bits = __float_as_uint(value);
    u32 sign = bits >> 16 & 0x8000;
    u32 magnitude = bits & 0x7fffffffu;
    if (0x7f800000u < magnitude) {
        return sign | 0x7e00;
    }
    if (magnitude < 0x38800000u) {
        // Below 2^-14: adding 1/2 rounds to a multiple of 2^-24.
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u);
    }
    // 65520 and larger values round to infinity.
    return sign | (0x477ff000u <= magnitude ? 0x7c00 : (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}
#endif

// Rounds to odd (toward zero, with the last bit set if inexact): narrowing the result to half precision then equals
// narrowing the binary64 value in one rounding.
__device__ __forceinline__ float to_odd(double value) {
    float cut = __double2float_rz(value);
    bool is_exact = (double)cut == value || value != value;
    return is_exact ? cut : __uint_as_float(__float_as_uint(cut) | 1);
}

__device__ __forceinline__ u32 narrow(float value, u32 kind) {
    return kind == FLOAT16 ? nearest_half(value) : nearest_brain(value);
}
__device__ __forceinline__ u32 narrow(double value, u32 kind) {
    return narrow(to_odd(value), kind);
}

__device__ __forceinline__ float widen(u32 bits, u32 kind) {
    return kind == FLOAT16 ? widen_half(bits) : widen_brain(bits);
}

// Memory accesses of packs. Addresses are multiples of 16; those of halves are multiples of 8 (float) or 4 (double).
__device__ __forceinline__ void load(Pack<float>& pack, const float* from) {
    float4 v = *(const float4*)from;
    pack.of[0] = v.x, pack.of[1] = v.y, pack.of[2] = v.z, pack.of[3] = v.w;
}
__device__ __forceinline__ void load(Pack<u32>& pack, const u32* from) {
    uint4 v = *(const uint4*)from;
    pack.of[0] = v.x, pack.of[1] = v.y, pack.of[2] = v.z, pack.of[3] = v.w;
}
__device__ __forceinline__ void load(Pack<double>& pack, const double* from) {
    double2 v = *(const double2*)from;
    pack.of[0] = v.x, pack.of[1] = v.y;
}
__device__ __forceinline__ void load(Pack<u64>& pack, const u64* from) {
    ulonglong2 v = *(const ulonglong2*)from;
    pack.of[0] = v.x, pack.of[1] = v.y;
}
__device__ __forceinline__ void store(const Pack<float>& pack, float* into) {
    float4 v;
    v.x = pack.of[0], v.y = pack.of[1], v.z = pack.of[2], v.w = pack.of[3];
    *(float4*)into = v;
}
__device__ __forceinline__ void store(const Pack<u32>& pack, u32* into) {
    uint4 v;
    v.x = pack.of[0], v.y = pack.of[1], v.z = pack.of[2], v.w = pack.of[3];
    *(uint4*)into = v;
}
__device__ __forceinline__ void store(const Pack<double>& pack, double* into) {
    double2 v;
    v.x = pack.of[0], v.y = pack.of[1];
    *(double2*)into = v;
}
__device__ __forceinline__ void store(const Pack<u64>& pack, u64* into) {
    ulonglong2 v;
    v.x = pack.of[0], v.y = pack.of[1];
    *(ulonglong2*)into = v;
}

__device__ __forceinline__ void load(HalfPack<float>& halves, const u16* from) {
    uint2 v = *(const uint2*)from;
    halves.of[0] = v.x, halves.of[1] = v.y;
}
__device__ __forceinline__ void load(HalfPack<double>& halves, const u16* from) {
    halves.of[0] = *(const u32*)from;
}
__device__ __forceinline__ void store_halves(const Pack<float>& pack, u16* into, u32 kind) {
    uint2 v;
    v.x = narrow(pack.of[0], kind) | narrow(pack.of[1], kind) << 16;
    v.y = narrow(pack.of[2], kind) | narrow(pack.of[3], kind) << 16;
    *(uint2*)into = v;
}
__device__ __forceinline__ void store_halves(const Pack<double>& pack, u16* into, u32 kind) {
    *(u32*)into = narrow(pack.of[0], kind) | narrow(pack.of[1], kind) << 16;
}

// Access to a tensor at one index: `Whole` moves a pack, `Single` one element. Both have the same members, so code
// over them is written once. `ask` loads halves and `widened` converts them later, so many loads can be in flight.
template <typename T> struct Whole {
    enum { LENGTH = Pack<T>::LENGTH };
    typedef HalfPack<T> Halves;
    static __device__ __forceinline__ void read(Pack<T>& pack, const T* from) {
        load(pack, from);
    }
    static __device__ __forceinline__ void ask(Halves& halves, const u16* from) {
        load(halves, from);
    }
    static __device__ __forceinline__ void widened(Pack<T>& pack, const Halves& halves, u32 kind) {
#pragma unroll
        for (int k = 0; k < LENGTH; k++) {
            pack.of[k] = widen(halves.of[k / 2] >> k % 2 * 16 & 0xffff, kind);
        }
    }
    static __device__ __forceinline__ void write(const Pack<T>& pack, T* into) {
        store(pack, into);
    }
    static __device__ __forceinline__ void write_halves(const Pack<T>& pack, u16* into, u32 kind) {
        store_halves(pack, into, kind);
    }
};

template <typename T> struct Single {
    enum { LENGTH = 1 };
    typedef HalfPack<T> Halves;
    static __device__ __forceinline__ void read(Pack<T>& pack, const T* from) {
        pack.of[0] = *from;
    }
    static __device__ __forceinline__ void ask(Halves& halves, const u16* from) {
        halves.of[0] = *from;
    }
    static __device__ __forceinline__ void widened(Pack<T>& pack, const Halves& halves, u32 kind) {
        pack.of[0] = widen(halves.of[0], kind);
    }
    static __device__ __forceinline__ void write(const Pack<T>& pack, T* into) {
        *into = pack.of[0];
    }
    static __device__ __forceinline__ void write_halves(const Pack<T>& pack, u16* into, u32 kind) {
        *into = (u16)narrow(pack.of[0], kind);
    }
};

// Loads halves and widens them immediately.
template <typename Access, typename T>
__device__ __forceinline__ void read_halves(Pack<T>& pack, const u16* from, u32 kind) {
    typename Access::Halves halves;
    Access::ask(halves, from);
    Access::widened(pack, halves, kind);
}

__device__ __forceinline__ u64 first_index() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ u64 index_step() {
    return (u64)gridDim.x * blockDim.x;
}
