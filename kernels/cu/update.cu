// Update of a dense tensor: sums the gradients and applies the rule, in one pass. kernels/src/cuda/emit.rs generates
// `Rule`.

// Applies the rule at one index. `state_at(state)` is the address of a state there, and `add(sum)` sums the gradients;
// gives the new weights.
template <typename Rule, typename Access, typename State, typename Sum>
__device__ __forceinline__ void apply_rule(
    Pack<typename Rule::T>& weights, const Rule& rule, typename Rule::T* into, State state_at, Sum add) {
    typedef typename Rule::T T;
    Pack<T> sum, states[Rule::STATES + 1];
    Access::read(weights, into);
#pragma unroll
    for (int state = 0; state < Rule::STATES; state++) {
        Access::read(states[state], state_at(state));
    }
    add(sum);
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
            Access::write(states[state], state_at(state));
        }
    }
    if (Rule::WRITTEN >> STATES_MAX & 1) {
        Access::write(weights, into);
    }
}

template <typename Rule, typename Access>
__device__ __forceinline__ void update_at(const UpdateArguments& a, const Rule& rule, u64 index) {
    typedef typename Rule::T T;
    Pack<T> weights;
    apply_rule<Rule, Access>(
        weights, rule, at<T>(a.weights) + index, [&](int state) { return at<T>(a.states[state]) + index; },
        [&](Pack<T>& sum) { sum_of<Access>(sum, a, index); });
    if (a.copy != 0) {
        give_copy<Access>(weights, a, index);
    }
}

template <typename Rule> __device__ __forceinline__ void update_all(const UpdateArguments& a) {
    typedef typename Rule::T T;
    if (is_skipped(a.skip)) {
        return;
    }
    const Rule rule(NumbersOf<T>{a});
    over<Pack<T>::LENGTH>(
        a.elements, is_aligned(a, Rule::STATES), [&](u64 index) { update_at<Rule, Whole<T>>(a, rule, index); },
        [&](u64 index) { update_at<Rule, Single<T>>(a, rule, index); });
}
