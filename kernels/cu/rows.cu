// Update of rows: sums the contributions to each unique row and applies the rule, in one pass. A warp takes a row.

// The sum of core::rows::Merge: adds equal rows within each contribution, then these sums in the order of
// contributions, then zero, as the oracle scatters sums into zeros.
template <typename T, typename Access, typename Read>
__device__ __forceinline__ void merge_row(
    Pack<T>& total, const RowsArguments& a, u32 begin, u32 end, u64 element, Read read) {
    const u32* places = at<const u32>(a.places);
    Pack<T> own;
    u32 contribution = 0, before = GRADIENTS_MAX;
    bool has_total = false;
    for (u32 index = begin; index < end; index++) {
        u32 place = places[index];
        while (contribution + 1 < a.count && a.firsts[contribution + 1] <= place) {
            contribution++;
        }
        Pack<T> row;
        u64 offset = (u64)(place - a.firsts[contribution]) * a.width + element;
        read(row, a.gradients[contribution], offset);
        bool is_next = contribution == before;
        for (int k = 0; k < Access::LENGTH; k++) {
            if (is_next) {
                own.of[k] = plus(own.of[k], row.of[k]);
            } else {
                if (before != GRADIENTS_MAX) {
                    total.of[k] = has_total ? plus(total.of[k], own.of[k]) : own.of[k];
                }
                own.of[k] = row.of[k];
            }
        }
        has_total = has_total || !is_next && before != GRADIENTS_MAX;
        before = contribution;
    }
    for (int k = 0; k < Access::LENGTH; k++) {
        total.of[k] = plus(has_total ? plus(total.of[k], own.of[k]) : own.of[k], (T)0);
    }
}

template <typename T, typename Access>
__device__ __forceinline__ void merge_any(Pack<T>& total, const RowsArguments& a, u32 begin, u32 end, u64 element) {
    u32 kind = a.gradient_kind;
    merge_row<T, Access>(total, a, begin, end, element, [=](Pack<T>& pack, u64 from, u64 offset) {
        if (kind == FLOAT16 || kind == BFLOAT16) {
            read_halves<Access>(pack, at<const u16>(from) + offset, kind);
        } else {
            Access::read(pack, at<const T>(from) + offset);
        }
    });
}

template <typename Rule, typename Access>
__device__ __forceinline__ void row_at(
    const RowsArguments& a, const Rule& rule, u64 record, u32 begin, u32 end, u32 element) {
    typedef typename Rule::T T;
    Pack<T> weights;
    apply_rule<Rule, Access>(
        weights, rule, at<T>(record) + element,
        [&](int state) { return at<T>(record + (state + 1) * a.state_stride) + element; },
        [&](Pack<T>& sum) { merge_any<T, Access>(sum, a, begin, end, element); });
}

template <typename Rule> __device__ __forceinline__ void rows_all(const RowsArguments& a) {
    typedef typename Rule::T T;
    if (is_skipped(a.skip)) {
        return;
    }
    const Rule rule([&](int place) { return at<const T>(a.scalars)[place]; });
    u64 bits = a.records | a.stride | a.state_stride;
    for (u32 gradient = 0; gradient < a.count; gradient++) {
        bits |= a.gradients[gradient];
    }
    u32 packed = (bits & 15) == 0 && a.width % Pack<T>::LENGTH == 0 ? a.width : 0;
    u32 unique = *at<const u32>(a.unique);
    u32 lane = threadIdx.x % 32;
    for (u64 row = first_index() / 32; row < unique; row += index_step() / 32) {
        u64 slot = a.slots != 0 ? at<const u32>(a.slots)[row] : at<const u64>(a.keys)[row];
        u64 record = a.records + slot * a.stride;
        u32 begin = at<const u32>(a.starts)[row], end = at<const u32>(a.starts)[row + 1];
        for (u32 element = lane * Pack<T>::LENGTH; element < packed; element += 32 * Pack<T>::LENGTH) {
            row_at<Rule, Whole<T>>(a, rule, record, begin, end, element);
        }
        for (u32 element = packed + lane; element < a.width; element += 32) {
            row_at<Rule, Single<T>>(a, rule, record, begin, end, element);
        }
    }
}
