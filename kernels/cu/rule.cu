// The operations of a rule, in the parameter's own type, each rounded once; core::rule::ssa defines them.

__device__ __forceinline__ float minus(float a, float b) {
    return __fsub_rn(a, b);
}
__device__ __forceinline__ double minus(double a, double b) {
    return __dsub_rn(a, b);
}
__device__ __forceinline__ float divided(float a, float b) {
    return __fdiv_rn(a, b);
}
__device__ __forceinline__ double divided(double a, double b) {
    return __ddiv_rn(a, b);
}
__device__ __forceinline__ float root(float a) {
    return __fsqrt_rn(a);
}
__device__ __forceinline__ double root(double a) {
    return __dsqrt_rn(a);
}
__device__ __forceinline__ float absolute(float a) {
    return fabsf(a);
}
__device__ __forceinline__ double absolute(double a) {
    return fabs(a);
}
__device__ __forceinline__ float floored(float a) {
    return floorf(a);
}
__device__ __forceinline__ double floored(double a) {
    return floor(a);
}
__device__ __forceinline__ float copy_sign(float a, float b) {
    return copysignf(a, b);
}
__device__ __forceinline__ double copy_sign(double a, double b) {
    return copysign(a, b);
}
template <typename T> __device__ __forceinline__ T sign(T a) {
    return (T)0 < absolute(a) ? copy_sign((T)1, a) : a;
}
template <typename T> __device__ __forceinline__ T minimum(T a, T b) {
    return b < a ? b : a;
}
template <typename T> __device__ __forceinline__ T maximum(T a, T b) {
    return b > a ? b : a;
}

// Conversions around functions that compute in binary64 and round once.
__device__ __forceinline__ double wide(float a) {
    return (double)a;
}
__device__ __forceinline__ double wide(double a) {
    return a;
}
template <typename T> struct Nearest;
template <> struct Nearest<float> {
    static __device__ __forceinline__ float of(double a) {
        return __double2float_rn(a);
    }
};
template <> struct Nearest<double> {
    static __device__ __forceinline__ double of(double a) {
        return a;
    }
};
