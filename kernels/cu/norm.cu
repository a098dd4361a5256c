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

extern "C" __global__ void __launch_bounds__(256, 4) pserver_squares_f32(const __grid_constant__ SquaresArguments a) {
    square_all<float>(a);
}
extern "C" __global__ void __launch_bounds__(256, 4) pserver_squares_f64(const __grid_constant__ SquaresArguments a) {
    square_all<double>(a);
}

// One block. All threads fetch, one adds: left to right is the order that is promised.
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

// All kinds are looked at as words of 32 bits: `exponent` has the bits that are all set in what is infinite or not a
// number, for each element of the word.
__device__ __forceinline__ bool has_exponent(u32 word, u32 exponent) {
    u32 low = exponent & 0xffff, high = exponent & 0xffff0000u;
    return (word & high) == high || low != 0 && (word & low) == low;
}

// Of 64-bit floats only the upper words count.
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
        // Whoever comes last writes the same.
        *at<u32>(a.flag) = 1;
    }
}
