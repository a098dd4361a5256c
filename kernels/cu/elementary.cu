// Elementary functions without an instruction: the operations of core/src/rule/elementary.rs in the same order, so the
// bits are equal. They are not inlined, because a rule calls them for every element of a pack.

__device__ __forceinline__ double add(double a, double b) {
    return __dadd_rn(a, b);
}
__device__ __forceinline__ double sub(double a, double b) {
    return __dsub_rn(a, b);
}
__device__ __forceinline__ double mul(double a, double b) {
    return __dmul_rn(a, b);
}
__device__ __forceinline__ double quotient(double a, double b) {
    return __ddiv_rn(a, b);
}
__device__ __forceinline__ double of_bits(u64 bits) {
    return __longlong_as_double((long long)bits);
}
__device__ __forceinline__ double infinity() {
    return of_bits(0x7ff0000000000000ull);
}
__device__ __forceinline__ double not_a_number() {
    return of_bits(0x7ff8000000000000ull);
}

#define LOG_2_HIGH of_bits(0x3fe62e42fee00000ull)
#define LOG_2_LOW of_bits(0x3dea39ef35793c76ull)
#define INVERSE_LOG_2 1.4426950408889634
#define EXPONENT_MAX 710.0
#define EXPONENT_MIN -746.0

struct Two {
    double high, low;
};

__device__ __forceinline__ Two larger_plus(double larger, double smaller) {
    Two two;
    two.high = add(larger, smaller);
    two.low = sub(smaller, sub(two.high, larger));
    return two;
}

__device__ __forceinline__ double cut(double x) {
    double moved = mul(134217729.0, x);
    return sub(moved, sub(moved, x));
}

__device__ __forceinline__ Two product_of(double a, double b) {
    Two two;
    two.high = mul(a, b);
    double a_high = cut(a), b_high = cut(b);
    double a_low = sub(a, a_high), b_low = sub(b, b_high);
    double lost = sub(mul(a_high, b_high), two.high);
    two.low = add(add(add(lost, mul(a_high, b_low)), mul(a_low, b_high)), mul(a_low, b_low));
    return two;
}

__device__ __forceinline__ double exponential_series(double x, double square) {
    double even = 1.0 / 6227020800.0;
    even = add(mul(even, square), 1.0 / 39916800.0);
    even = add(mul(even, square), 1.0 / 362880.0);
    even = add(mul(even, square), 1.0 / 5040.0);
    even = add(mul(even, square), 1.0 / 120.0);
    even = add(mul(even, square), 1.0 / 6.0);
    double odd = 1.0 / 87178291200.0;
    odd = add(mul(odd, square), 1.0 / 479001600.0);
    odd = add(mul(odd, square), 1.0 / 3628800.0);
    odd = add(mul(odd, square), 1.0 / 40320.0);
    odd = add(mul(odd, square), 1.0 / 720.0);
    odd = add(mul(odd, square), 1.0 / 24.0);
    return add(even, mul(x, odd));
}

__device__ __forceinline__ double logarithm_series(double x) {
    double square = mul(x, x);
    double even = 2.0 / 25.0;
    even = add(mul(even, square), 2.0 / 21.0);
    even = add(mul(even, square), 2.0 / 17.0);
    even = add(mul(even, square), 2.0 / 13.0);
    even = add(mul(even, square), 2.0 / 9.0);
    even = add(mul(even, square), 2.0 / 5.0);
    double odd = 2.0 / 23.0;
    odd = add(mul(odd, square), 2.0 / 19.0);
    odd = add(mul(odd, square), 2.0 / 15.0);
    odd = add(mul(odd, square), 2.0 / 11.0);
    odd = add(mul(odd, square), 2.0 / 7.0);
    return add(even, mul(x, odd));
}

__device__ __forceinline__ double power_of_two(long long exponent) {
    return of_bits((u64)(exponent + 1023) << 52);
}

__device__ __forceinline__ double scaled(double x, long long exponent) {
    if (-1022 <= exponent && exponent <= 1023) {
        return mul(x, power_of_two(exponent));
    }
    long long half = exponent >> 1;
    return mul(mul(x, power_of_two(half)), power_of_two(exponent - half));
}

struct Reduced {
    long long exponent;
    double rest, lost;
};

__device__ __forceinline__ Reduced reduced(double x, double low) {
    Reduced reduced;
    const double whole_bits = 6755399441055744.0;
    double moved = add(mul(x, INVERSE_LOG_2), whole_bits);
    double whole = sub(moved, whole_bits);
    double high = sub(x, mul(whole, LOG_2_HIGH));
    low = sub(mul(whole, LOG_2_LOW), low);
    reduced.exponent = __double_as_longlong(moved) - __double_as_longlong(whole_bits);
    reduced.rest = sub(high, low);
    reduced.lost = sub(sub(high, reduced.rest), low);
    return reduced;
}

__device__ __forceinline__ double exponential_of(double x, double low) {
    if (EXPONENT_MAX < x) {
        return infinity();
    }
    if (x < EXPONENT_MIN) {
        return 0.0;
    }
    Reduced r = reduced(x, low);
    Two square = product_of(r.rest, r.rest);
    Two sum = larger_plus(1.0, r.rest);
    Two total = larger_plus(sum.high, mul(0.5, square.high));
    double cube = mul(mul(r.rest, square.high), exponential_series(r.rest, square.high));
    double small = add(add(total.low, sum.low), add(add(mul(0.5, square.low), r.lost), cube));
    return scaled(add(total.high, small), r.exponent);
}

__device__ __noinline__ double exponential(double x) {
    return x != x ? x : exponential_of(x, 0.0);
}

__device__ __noinline__ double exponential_minus_one(double x) {
    if (x != x || fabs(x) < 1e-17) {
        return x;
    }
    if (EXPONENT_MAX < x) {
        return infinity();
    }
    if (x < -50.0) {
        return -1.0;
    }
    Reduced r = reduced(x, 0.0);
    double square = mul(r.rest, r.rest);
    double factor = add(0.5, mul(r.rest, exponential_series(r.rest, square)));
    double above_one = add(r.rest, add(mul(square, factor), r.lost));
    if (r.exponent == 0) {
        return above_one;
    }
    double one = 60 < r.exponent ? 1.0 : sub(1.0, power_of_two(-r.exponent));
    return scaled(add(one, above_one), r.exponent);
}

// The exponent k in `high`, the fraction f in `low`.
__device__ __forceinline__ Two parts(double x) {
    const u64 root_of_half = 0x3fe6a09e667f3bcdull, one = 0x3ff0000000000000ull;
    bool is_small = x < of_bits(0x0010000000000000ull);
    u64 bits = (u64)__double_as_longlong(is_small ? mul(x, power_of_two(54)) : x) + (one - root_of_half);
    Two two;
    two.high = sub((double)(bits >> 52), is_small ? 1077.0 : 1023.0);
    two.low = sub(of_bits((bits & 0x000fffffffffffffull) + root_of_half), 1.0);
    return two;
}

__device__ __forceinline__ Two logarithm_in_two(double x) {
    Two split = parts(x);
    double exponent = split.high, fraction = split.low;
    double divisor = add(2.0, fraction);
    double divisor_low = sub(fraction, sub(divisor, 2.0));
    double inverse = quotient(1.0, divisor);
    double share = mul(fraction, inverse);
    Two t = product_of(share, divisor);
    double share_low = mul(sub(sub(sub(fraction, t.high), t.low), mul(share, divisor_low)), inverse);
    Two square = product_of(share, share);
    square.low = add(square.low, mul(mul(2.0, share), share_low));
    Two factor = larger_plus(2.0 / 3.0, mul(square.high, logarithm_series(square.high)));
    factor.low = add(factor.low, of_bits(0x3c85555555555555ull));
    Two product = product_of(square.high, factor.high);
    product.low = add(product.low, add(mul(square.high, factor.low), mul(square.low, factor.high)));
    Two cubic = product_of(share, product.high);
    cubic.low = add(cubic.low, add(mul(share, product.low), mul(share_low, product.high)));
    Two sum = larger_plus(mul(2.0, share), cubic.high);
    sum.low = add(sum.low, add(mul(2.0, share_low), cubic.low));
    if (exponent == 0.0) {
        return larger_plus(sum.high, sum.low);
    }
    Two total = larger_plus(mul(exponent, LOG_2_HIGH), sum.high);
    return larger_plus(total.high, add(total.low, add(mul(exponent, LOG_2_LOW), sum.low)));
}

__device__ __noinline__ double logarithm(double x) {
    if (x != x || x == infinity()) {
        return x;
    }
    if (x <= 0.0) {
        return x == 0.0 ? -infinity() : not_a_number();
    }
    return logarithm_in_two(x).high;
}

__device__ __forceinline__ double logarithm_of(double exponent, double fraction, double lost) {
    double share = quotient(fraction, add(2.0, fraction));
    double square = mul(share, share);
    double rest = mul(square, add(2.0 / 3.0, mul(square, logarithm_series(square))));
    double half = mul(mul(0.5, fraction), fraction);
    double low = add(mul(share, add(half, rest)), add(mul(exponent, LOG_2_LOW), lost));
    return sub(mul(exponent, LOG_2_HIGH), sub(sub(half, low), fraction));
}

__device__ __noinline__ double logarithm_one_plus(double x) {
    if (x != x || x == infinity() || fabs(x) < 1e-17) {
        return x;
    }
    if (x <= -1.0) {
        return x == -1.0 ? -infinity() : not_a_number();
    }
    if (-0.25 < x && x < 0.375) {
        return logarithm_of(0.0, x, 0.0);
    }
    double sum = add(1.0, x);
    double lost = 1.0 <= x ? sub(1.0, sub(sum, x)) : sub(x, sub(sum, 1.0));
    Two split = parts(sum);
    return logarithm_of(split.high, split.low, quotient(lost, sum));
}

__device__ __noinline__ double hyperbolic_tangent(double x) {
    double magnitude = fabs(x);
    if (x != x || magnitude < 1e-9) {
        return x;
    }
    double value = 1.0;
    if (22.0 < magnitude) {
        value = 1.0;
    } else if (1.0 <= magnitude) {
        value = sub(1.0, quotient(2.0, add(exponential_minus_one(mul(2.0, magnitude)), 2.0)));
    } else {
        double below = exponential_minus_one(mul(-2.0, magnitude));
        value = quotient(-below, add(below, 2.0));
    }
    return copysign(value, x);
}

__device__ __forceinline__ double vast(bool is_infinite, double sign) {
    return mul(is_infinite ? infinity() : 0.0, sign);
}

__device__ __noinline__ double power(double x, double y) {
    if (y == 0.0 || x == 1.0) {
        return 1.0;
    }
    if (x != x || y != y) {
        return not_a_number();
    }
    double magnitude = fabs(x);
    if (fabs(y) == infinity()) {
        bool grows = (1.0 < magnitude) == (0.0 < y);
        return magnitude == 1.0 ? 1.0 : vast(grows, 1.0);
    }
    double half = mul(0.5, y);
    bool is_odd = floor(y) == y && floor(half) != half;
    double sign = is_odd ? copysign(1.0, x) : 1.0;
    if (magnitude == 0.0 || magnitude == infinity()) {
        return vast((magnitude == 0.0) == (y < 0.0), sign);
    }
    if (x < 0.0 && floor(y) != y) {
        return not_a_number();
    }
    if (magnitude == 1.0) {
        return sign;
    }
    Two log = logarithm_in_two(magnitude);
    double rough = mul(y, log.high);
    if (EXPONENT_MAX < rough || rough < EXPONENT_MIN) {
        return vast(0.0 < rough, sign);
    }
    Two product = product_of(y, log.high);
    return mul(exponential_of(product.high, add(product.low, mul(y, log.low))), sign);
}
