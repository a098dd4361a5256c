// Kernels of the algorithms `add` and `sum`, which have no rule.

template <typename T> struct Scaling {
    T scale;
    __device__ T operator()(T value) const {
        return times(value, scale);
    }
};
template <> struct Scaling<u32> {
    u32 scale;
    __device__ u32 operator()(u32 value) const {
        return value;
    }
};
template <> struct Scaling<u64> {
    u64 scale;
    __device__ u64 operator()(u64 value) const {
        return value;
    }
};

template <typename T, typename Access>
__device__ __forceinline__ void merge_at(const UpdateArguments& a, Scaling<T> scaled, u64 index) {
    Pack<T> sum, weights;
    sum_of<Access>(sum, a, index);
    T* into = at<T>(a.weights) + index;
    if (a.merge == MERGE_ADD) {
        Access::read(weights, into);
    }
    for (int k = 0; k < Access::LENGTH; k++) {
        T s = sum.of[k];
        weights.of[k] = a.merge == MERGE_SUM ? s : a.merge == MERGE_ADD ? plus(weights.of[k], scaled(s)) : scaled(s);
    }
    Access::write(weights, into);
    if (a.copy != 0) {
        give_copy<Access>(weights, a, index);
    }
}

template <typename T> __device__ __forceinline__ void merge_all(const UpdateArguments& a) {
    if (is_skipped(a.skip)) {
        return;
    }
    Scaling<T> scaled;
    scaled.scale = NumbersOf<T>{a}(0);
    over<Pack<T>::LENGTH>(
        a.elements, is_aligned(a, 0), [&](u64 index) { merge_at<T, Whole<T>>(a, scaled, index); },
        [&](u64 index) { merge_at<T, Single<T>>(a, scaled, index); });
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_sum_f32(const __grid_constant__ UpdateArguments a) {
    merge_all<float>(a);
}
extern "C" __global__ void __launch_bounds__(256, 4) pserver_sum_f64(const __grid_constant__ UpdateArguments a) {
    merge_all<double>(a);
}
extern "C" __global__ void __launch_bounds__(256, 4) pserver_sum_u32(const __grid_constant__ UpdateArguments a) {
    merge_all<u32>(a);
}
extern "C" __global__ void __launch_bounds__(256, 4) pserver_sum_u64(const __grid_constant__ UpdateArguments a) {
    merge_all<u64>(a);
}
