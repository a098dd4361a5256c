// Conversion between floating-point types; each element is rounded once, to nearest even.

template <typename Access>
__device__ __forceinline__ void cast_single(const CastArguments& a, u64 index) {
    Pack<float> pack;
    if (a.from_kind == FLOAT32) {
        Access::read(pack, at<const float>(a.from) + index);
    } else {
        read_halves<Access>(pack, at<const u16>(a.from) + index, a.from_kind);
    }
    if (a.into_kind == FLOAT32) {
        Access::write(pack, at<float>(a.into) + index);
    } else if (a.into_kind == FLOAT64) {
        for (int k = 0; k < Access::LENGTH; k++) {
            at<double>(a.into)[index + k] = (double)pack.of[k];
        }
    } else {
        Access::write_halves(pack, at<u16>(a.into) + index, a.into_kind);
    }
}

template <typename Access>
__device__ __forceinline__ void cast_double(const CastArguments& a, u64 index) {
    Pack<double> pack;
    Access::read(pack, at<const double>(a.from) + index);
    if (a.into_kind == FLOAT64) {
        Access::write(pack, at<double>(a.into) + index);
    } else if (a.into_kind == FLOAT32) {
        for (int k = 0; k < Access::LENGTH; k++) {
            at<float>(a.into)[index + k] = __double2float_rn(pack.of[k]);
        }
    } else {
        Access::write_halves(pack, at<u16>(a.into) + index, a.into_kind);
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_cast(const __grid_constant__ CastArguments a) {
    bool is_aligned = ((a.from | a.into) & 15) == 0;
    if (a.from_kind == FLOAT64) {
        over<Pack<double>::LENGTH>(
            a.elements, is_aligned, [&](u64 index) { cast_double<Whole<double>>(a, index); },
            [&](u64 index) { cast_double<Single<double>>(a, index); });
    } else {
        over<Pack<float>::LENGTH>(
            a.elements, is_aligned, [&](u64 index) { cast_single<Whole<float>>(a, index); },
            [&](u64 index) { cast_single<Single<float>>(a, index); });
    }
}
