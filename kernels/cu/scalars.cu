// A rule's scalars, computed from the values that change between updates: one thread runs the list of
// core::rule::ssa::ScalarOp.

enum { SCALARS_MAX = 256 };
// The numbers of kernels/src/cuda/scalars.rs.
enum {
    SCALAR_CONSTANT, SCALAR_RATE, SCALAR_COUNT, SCALAR_GRADIENT_SCALE,
    SCALAR_NEGATE, SCALAR_ABSOLUTE, SCALAR_SQUARE_ROOT, SCALAR_SIGN, SCALAR_FLOOR,
    SCALAR_ADD, SCALAR_SUBTRACT, SCALAR_MULTIPLY, SCALAR_DIVIDE, SCALAR_MINIMUM, SCALAR_MAXIMUM, SCALAR_COPY_SIGN,
    SCALAR_LESS, SCALAR_LESS_OR_EQUAL, SCALAR_EQUAL, SCALAR_SELECT,
    SCALAR_EXPONENTIAL, SCALAR_EXPONENTIAL_MINUS_ONE, SCALAR_LOGARITHM, SCALAR_LOGARITHM_ONE_PLUS,
    SCALAR_HYPERBOLIC_TANGENT, SCALAR_POWER
};

__device__ double scalar_of(u32 operation, double x, double y, double z) {
    switch (operation) {
    case SCALAR_NEGATE: return -x;
    case SCALAR_ABSOLUTE: return fabs(x);
    case SCALAR_SQUARE_ROOT: return __dsqrt_rn(x);
    case SCALAR_SIGN: return 0.0 < fabs(x) ? copysign(1.0, x) : x;
    case SCALAR_FLOOR: return floor(x);
    case SCALAR_ADD: return add(x, y);
    case SCALAR_SUBTRACT: return sub(x, y);
    case SCALAR_MULTIPLY: return mul(x, y);
    case SCALAR_DIVIDE: return quotient(x, y);
    case SCALAR_MINIMUM: return y < x ? y : x;
    case SCALAR_MAXIMUM: return y > x ? y : x;
    case SCALAR_COPY_SIGN: return copysign(x, y);
    case SCALAR_LESS: return x < y ? 1.0 : 0.0;
    case SCALAR_LESS_OR_EQUAL: return x <= y ? 1.0 : 0.0;
    case SCALAR_EQUAL: return x == y ? 1.0 : 0.0;
    case SCALAR_SELECT: return x == 0.0 ? z : y;
    case SCALAR_EXPONENTIAL: return exponential(x);
    case SCALAR_EXPONENTIAL_MINUS_ONE: return exponential_minus_one(x);
    case SCALAR_LOGARITHM: return logarithm(x);
    case SCALAR_LOGARITHM_ONE_PLUS: return logarithm_one_plus(x);
    case SCALAR_HYPERBOLIC_TANGENT: return hyperbolic_tangent(x);
    default: return power(x, y);
    }
}

// The nearest binary32; a scalar other than zero becomes at least the smallest normal number.
__device__ __forceinline__ float round_scalar(double scalar) {
    float nearest = __double2float_rn(scalar);
    const float smallest = __uint_as_float(0x00800000u);
    return scalar != 0.0 && fabsf(nearest) < smallest ? copysignf(smallest, nearest) : nearest;
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_scalars(const __grid_constant__ ScalarsArguments a) {
    __shared__ double values[SCALARS_MAX];
    if (blockIdx.x != 0) {
        return;
    }
    if (threadIdx.x == 0) {
        ScalarValues* given = at<ScalarValues>(a.values);
        double scale = given->scale;
        if (a.total != 0) {
            double norm = mul(__dsqrt_rn(*at<const double>(a.total)), scale);
            scale = mul(scale, given->clip_norm < norm ? quotient(given->clip_norm, norm) : 1.0);
        }
        const ScalarCode* code = at<const ScalarCode>(a.code);
        for (u32 place = 0; place < a.operations; place++) {
            ScalarCode op = code[place];
            double value;
            if (op.operation == SCALAR_CONSTANT) {
                value = op.value;
            } else if (op.operation == SCALAR_RATE) {
                value = given->rate;
            } else if (op.operation == SCALAR_COUNT) {
                value = given->count;
            } else if (op.operation == SCALAR_GRADIENT_SCALE) {
                value = scale;
            } else {
                double x = values[op.operands[0]], y = values[op.operands[1]], z = values[op.operands[2]];
                value = scalar_of(op.operation, x, y, z);
            }
            values[place] = value;
        }
        if (a.advances != 0 && !is_skipped(a.skip)) {
            given->count = add(given->count, 1.0);
        }
    }
    __syncthreads();
    if (threadIdx.x < a.used) {
        double value = values[at<const u32>(a.places)[threadIdx.x]];
        if (a.kind == FLOAT64) {
            at<double>(a.scalars)[threadIdx.x] = value;
        } else {
            at<float>(a.scalars)[threadIdx.x] = round_scalar(value);
        }
    }
}
