// The norm of a gradient, and whether one is finite.

// The sum of squares of 4 KiB, left to right in binary64 as core::optim::square_sums has it. A thread has a block to
// itself: there are many blocks, and what a warp reads of a line at once it reads from the cache the next time.
template <typename T> __device__ __forceinline__ double square(T value) {
    double wide = (double)value;
    return __dmul_rn(wide, wide);
}

template <typename T> __device__ __forceinline__ void square_all(const SquaresArguments& a) {
    const u64 length = 4096 / sizeof(T);
    const T* values = at<const T>(a.values);
    for (u64 block = first_index(); block * length < a.elements; block += index_step()) {
        u64 begin = block * length;
        u64 end = a.elements - begin < length ? a.elements : begin + length;
        double total = 0.0;
        u64 index = begin;
        if ((a.values & 15) == 0) {
            for (; index + Pack<T>::LENGTH <= end; index += Pack<T>::LENGTH) {
                Pack<T> pack;
                load(pack, values + index);
                for (int k = 0; k < Pack<T>::LENGTH; k++) {
                    total = __dadd_rn(total, square(pack.of[k]));
                }
            }
        }
        for (; index < end; index++) {
            total = __dadd_rn(total, square(values[index]));
        }
        at<double>(a.squares)[block] = total;
    }
}

extern "C" __global__ void __launch_bounds__(256) pserver_squares_f32(const __grid_constant__ SquaresArguments a) {
    square_all<float>(a);
}
extern "C" __global__ void __launch_bounds__(256) pserver_squares_f64(const __grid_constant__ SquaresArguments a) {
    square_all<double>(a);
}

// One block. All threads fetch, one adds: left to right is the order that is promised.
extern "C" __global__ void __launch_bounds__(256) pserver_total(const __grid_constant__ TotalArguments a) {
    __shared__ double fetched[256];
    const double* squares = at<const double>(a.squares);
    if (blockIdx.x != 0) {
        return;
    }
    double total = threadIdx.x == 0 ? *at<double>(a.total) : 0.0;
    for (u64 begin = 0; begin < a.count; begin += 256) {
        if (begin + threadIdx.x < a.count) {
            fetched[threadIdx.x] = squares[begin + threadIdx.x];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 length = a.count - begin < 256 ? (u32)(a.count - begin) : 256;
            for (u32 k = 0; k < length; k++) {
                total = __dadd_rn(total, fetched[k]);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *at<double>(a.total) = total;
    }
}

__device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}
__device__ __forceinline__ bool is_finite(double value) {
    return (__double_as_longlong(value) & 0x7ff0000000000000ll) != 0x7ff0000000000000ll;
}

template <typename T, typename Access, typename Read>
__device__ __forceinline__ void finite_at(const FiniteArguments& a, Read read) {
    bool is_fine = true;
    for (u32 gradient = 0; gradient < a.count; gradient++) {
        Pack<T> pack;
        read(pack, a.gradients[gradient]);
        for (int k = 0; k < Access::LENGTH; k++) {
            is_fine = is_fine && is_finite(pack.of[k]);
        }
    }
    if (!is_fine) {
        // Whoever comes last writes the same.
        *at<u32>(a.flag) = 1;
    }
}

template <typename T> __device__ __forceinline__ void finite_own(const FiniteArguments& a, bool is_aligned) {
    over<Pack<T>::LENGTH>(
        a.elements, is_aligned,
        [&](u64 index) {
            finite_at<T, Whole<T>>(
                a, [=](Pack<T>& pack, u64 from) { Whole<T>::read(pack, at<const T>(from) + index); });
        },
        [&](u64 index) {
            finite_at<T, Single<T>>(
                a, [=](Pack<T>& pack, u64 from) { Single<T>::read(pack, at<const T>(from) + index); });
        });
}

extern "C" __global__ void __launch_bounds__(256) pserver_finite(const __grid_constant__ FiniteArguments a) {
    u64 bits = 0;
    for (u32 gradient = 0; gradient < a.count; gradient++) {
        bits |= a.gradients[gradient];
    }
    bool is_aligned = (bits & 15) == 0;
    u32 kind = a.kind;
    if (kind == FLOAT32) {
        finite_own<float>(a, is_aligned);
    } else if (kind == FLOAT64) {
        finite_own<double>(a, is_aligned);
    } else {
        typedef Pack<float> P;
        over<P::LENGTH>(
            a.elements, is_aligned,
            [&](u64 index) {
                finite_at<float, Whole<float>>(
                    a, [=](P& pack, u64 from) { load_halves(pack, at<const u16>(from) + index, kind); });
            },
            [&](u64 index) {
                finite_at<float, Single<float>>(
                    a, [=](P& pack, u64 from) { pack.of[0] = widen(at<const u16>(from)[index], kind); });
            });
    }
}
