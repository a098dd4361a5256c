// Squares of a gradient for its norm, and a check for non-finite elements.

// The sum of squares of 4 KiB, left to right in binary64, in the order of core::optim::square_sums. Each thread sums
// one block of 4 KiB: blocks are many, and the other accesses to a cache line that a warp has loaded hit the cache.
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

extern "C" __global__ void __launch_bounds__(256, 4) pserver_squares_f32(const __grid_constant__ SquaresArguments a) {
    square_all<float>(a);
}
extern "C" __global__ void __launch_bounds__(256, 4) pserver_squares_f64(const __grid_constant__ SquaresArguments a) {
    square_all<double>(a);
}

// Runs on one thread block. All threads load and one adds, because the sum is defined from left to right.
extern "C" __global__ void __launch_bounds__(256, 4) pserver_total(const __grid_constant__ TotalArguments a) {
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

// All kinds are checked as words of 32 bits. `exponent` is the mask of the exponent bits of each element in the word;
// in an infinity or a NaN they are all set.
__device__ __forceinline__ bool has_exponent(u32 word, u32 exponent) {
    u32 low = exponent & 0xffff, high = exponent & 0xffff0000u;
    return (word & high) == high || low != 0 && (word & low) == low;
}

// Of a binary64 only the upper word has exponent bits.
extern "C" __global__ void __launch_bounds__(256, 4) pserver_finite(const __grid_constant__ FiniteArguments a) {
    u32 bytes = a.kind == FLOAT64 ? 8 : a.kind == FLOAT32 ? 4 : 2;
    u32 exponent = a.kind == FLOAT64 ? 0x7ff00000u
        : a.kind == FLOAT32          ? 0x7f800000u
        : a.kind == FLOAT16          ? 0x7c007c00u
                                     : 0x7f807f80u;
    bool is_fine = true;
    for (u32 gradient = 0; gradient < a.count; gradient++) {
        u64 begin = a.gradients[gradient];
        u64 packs = (begin & 15) == 0 ? a.elements * bytes / 16 : 0;
        for (u64 pack = first_index(); pack < packs; pack += index_step()) {
            uint4 v = at<const uint4>(begin)[pack];
            bool is_even = a.kind != FLOAT64 && (has_exponent(v.x, exponent) || has_exponent(v.z, exponent));
            is_fine = is_fine && !is_even && !has_exponent(v.y, exponent) && !has_exponent(v.w, exponent);
        }
        for (u64 index = packs * (16 / bytes) + first_index(); index < a.elements; index += index_step()) {
            u32 word = bytes == 8 ? at<const u32>(begin)[2 * index + 1]
                : bytes == 4      ? at<const u32>(begin)[index]
                                  : (u32)at<const u16>(begin)[index] << 16;
            is_fine = is_fine && !has_exponent(word, exponent & (bytes == 2 ? 0xffff0000u : 0xffffffffu));
        }
    }
    if (!is_fine) {
        // All threads write the same value.
        *at<u32>(a.flag) = 1;
    }
}
