// Sums of gradients, and the loop of a kernel over tensors.

// A gradient at `index`, in its own type or as halves of a kind: `ask` starts a load and `take` uses its result.
template <typename T, typename Access> struct Own {
    typedef Pack<T> Asked;
    u64 index;
    __device__ __forceinline__ void ask(Asked& asked, u64 from) const {
        Access::read(asked, at<const T>(from) + index);
    }
    __device__ __forceinline__ void take(Pack<T>& pack, const Asked& asked) const {
        pack = asked;
    }
};
template <typename T, typename Access, u32 KIND> struct Halves {
    typedef typename Access::Halves Asked;
    u64 index;
    __device__ __forceinline__ void ask(Asked& asked, u64 from) const {
        Access::ask(asked, at<const u16>(from) + index);
    }
    __device__ __forceinline__ void take(Pack<T>& pack, const Asked& asked) const {
        Access::widened(pack, asked, KIND);
    }
};

// The neutral element of addition: adding any number to it gives that number, minus zero included.
template <typename T> struct Nothing {
    static __device__ __forceinline__ T value() {
        return 0;
    }
};
template <> struct Nothing<float> {
    static __device__ __forceinline__ float value() {
        return -0.0f;
    }
};
template <> struct Nothing<double> {
    static __device__ __forceinline__ double value() {
        return -0.0;
    }
};

// Adds the gradients in order, to the partial sum if there is one. Four packs are loaded before the first is added, so
// a thread waits once for each four; with the loads of weights and states this keeps memory busy.
template <typename T, typename Access, typename Read>
__device__ __forceinline__ void add_all(Pack<T>& sum, const UpdateArguments& a, u64 index, const Read& read) {
    enum { AT_ONCE = Access::LENGTH == 1 ? 1 : 4 };
    u32 count = a.count;
    if (a.sum != 0) {
        Access::read(sum, at<const T>(a.sum) + index);
    } else {
#pragma unroll
        for (int k = 0; k < Access::LENGTH; k++) {
            sum.of[k] = count != 0 ? Nothing<T>::value() : 0;
        }
    }
#pragma unroll 1
    for (u32 first = 0; first < count; first += AT_ONCE) {
        typename Read::Asked asked[AT_ONCE];
#pragma unroll
        for (u32 next = 0; next < AT_ONCE; next++) {
            if (first + next < count) {
                read.ask(asked[next], a.gradients[first + next]);
            }
        }
#pragma unroll
        for (u32 next = 0; next < AT_ONCE; next++) {
            if (first + next < count) {
                Pack<T> gradient;
                read.take(gradient, asked[next]);
#pragma unroll
                for (int k = 0; k < Access::LENGTH; k++) {
                    sum.of[k] = plus(sum.of[k], gradient.of[k]);
                }
            }
        }
    }
}

template <typename T, typename Access>
__device__ __forceinline__ void sum_own(Pack<T>& sum, const UpdateArguments& a, u64 index) {
    add_all<T, Access>(sum, a, index, Own<T, Access>{index});
}

template <typename T, typename Access>
__device__ __forceinline__ void sum_any(Pack<T>& sum, const UpdateArguments& a, u64 index) {
    if (a.gradient_kind == FLOAT16) {
        add_all<T, Access>(sum, a, index, Halves<T, Access, FLOAT16>{index});
    } else if (a.gradient_kind == BFLOAT16) {
        add_all<T, Access>(sum, a, index, Halves<T, Access, BFLOAT16>{index});
    } else {
        sum_own<T, Access>(sum, a, index);
    }
}

template <typename Access> __device__ __forceinline__ void sum_of(Pack<float>& sum, const UpdateArguments& a, u64 index) {
    sum_any<float, Access>(sum, a, index);
}
template <typename Access> __device__ __forceinline__ void sum_of(Pack<double>& sum, const UpdateArguments& a, u64 index) {
    sum_any<double, Access>(sum, a, index);
}
template <typename Access> __device__ __forceinline__ void sum_of(Pack<u32>& sum, const UpdateArguments& a, u64 index) {
    sum_own<u32, Access>(sum, a, index);
}
template <typename Access> __device__ __forceinline__ void sum_of(Pack<u64>& sum, const UpdateArguments& a, u64 index) {
    sum_own<u64, Access>(sum, a, index);
}

// Writes the new weights a second time, in half precision.
template <typename T, typename Access>
__device__ __forceinline__ void write_copy(const Pack<T>& weights, const UpdateArguments& a, u64 index) {
    Access::write_halves(weights, at<u16>(a.copy) + index, a.copy_kind);
}
template <typename Access>
__device__ __forceinline__ void give_copy(const Pack<float>& weights, const UpdateArguments& a, u64 index) {
    write_copy<float, Access>(weights, a, index);
}
template <typename Access>
__device__ __forceinline__ void give_copy(const Pack<double>& weights, const UpdateArguments& a, u64 index) {
    write_copy<double, Access>(weights, a, index);
}
template <typename Access> __device__ __forceinline__ void give_copy(const Pack<u32>&, const UpdateArguments&, u64) {
}
template <typename Access> __device__ __forceinline__ void give_copy(const Pack<u64>&, const UpdateArguments&, u64) {
}

// Whether the address of every tensor is a multiple of 16.
__device__ __forceinline__ bool is_aligned(const UpdateArguments& a, int states) {
    u64 bits = a.weights | a.sum | a.copy;
    for (int state = 0; state < states; state++) {
        bits |= a.states[state];
    }
    for (u32 gradient = 0; gradient < a.count; gradient++) {
        bits |= a.gradients[gradient];
    }
    return (bits & 15) == 0;
}

// Runs `whole(index)` for every pack and `single(index)` for the remaining elements; without `is_packed` for all.
template <int LENGTH, typename W, typename S>
__device__ __forceinline__ void over(u64 elements, bool is_packed, W whole, S single) {
    u64 packs = is_packed ? elements / LENGTH : 0;
    for (u64 pack = first_index(); pack < packs; pack += index_step()) {
        whole(pack * LENGTH);
    }
    for (u64 index = packs * LENGTH + first_index(); index < elements; index += index_step()) {
        single(index);
    }
}
