// A sum of gradients and a rule on it, in one pass. `Rule` is what kernels/src/cuda/emit.rs makes of a rule.

template <typename Rule, typename Access>
__device__ __forceinline__ void update_at(const UpdateArguments& a, const Rule& rule, u64 index) {
    typedef typename Rule::T T;
    Pack<T> sum, weights, states[Rule::STATES + 1];
    T* into = at<T>(a.weights) + index;
    Access::read(weights, into);
#pragma unroll
    for (int state = 0; state < Rule::STATES; state++) {
        Access::read(states[state], at<T>(a.states[state]) + index);
    }
    sum_of<Access>(sum, a, index);
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
            Access::write(states[state], at<T>(a.states[state]) + index);
        }
    }
    if (Rule::WRITTEN >> STATES_MAX & 1) {
        Access::write(weights, into);
    }
    if (a.copy != 0) {
        give_copy<Access>(weights, a, index);
    }
}

template <typename Rule> __device__ __forceinline__ void update_all(const UpdateArguments& a) {
    typedef typename Rule::T T;
    if (is_skipped(a.skip)) {
        return;
    }
    const Rule rule(at<const T>(a.scalars));
    over<Pack<T>::LENGTH>(
        a.elements, is_aligned(a, Rule::STATES), [&](u64 index) { update_at<Rule, Whole<T>>(a, rule, index); },
        [&](u64 index) { update_at<Rule, Single<T>>(a, rule, index); });
}
