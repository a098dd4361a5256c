// Rows: a unique row's contributions are summed and the rule is applied, in one pass. A warp takes a row.

// The sum of core::rows::Merge: each contribution's rows by themselves, then these sums in order, then zero, which a row
// is scattered into.
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
    Pack<T> sum, weights, states[Rule::STATES + 1];
    Access::read(weights, at<T>(record) + element);
#pragma unroll
    for (int state = 0; state < Rule::STATES; state++) {
        Access::read(states[state], at<T>(record + (state + 1) * a.state_stride) + element);
    }
    merge_any<T, Access>(sum, a, begin, end, element);
#pragma unroll
    for (int k = 0; k < Access::LENGTH; k++) {
        T kept[Rule::STATES + 1];
#pragma unroll
        for (int state = 0; state < Rule::STATES; state++) {
            kept[state] = states[state].of[k];
        }
        rule.run(weights.of[k], kept, sum.of[k]);
#pragma unroll
        for (int state = 0; state < Rule::STATES; state++) {
            states[state].of[k] = kept[state];
        }
    }
#pragma unroll
    for (int state = 0; state < Rule::STATES; state++) {
        if (Rule::WRITTEN >> state & 1) {
            Access::write(states[state], at<T>(record + (state + 1) * a.state_stride) + element);
        }
    }
    if (Rule::WRITTEN >> STATES_MAX & 1) {
        Access::write(weights, at<T>(record) + element);
    }
}

template <typename Rule> __device__ __forceinline__ void rows_all(const RowsArguments& a) {
    typedef typename Rule::T T;
    if (is_skipped(a.skip)) {
        return;
    }
    const Rule rule(at<const T>(a.scalars));
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
