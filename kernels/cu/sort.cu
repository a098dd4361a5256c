// Groups equal row ids: a stable radix sort of (id, place) pairs, then the start of each unique id. No atomics: the
// position of a pair depends on the pairs alone.

enum { SORT_TILE = 2048, WARPS = 8, ROUNDS = SORT_TILE / 256, DIGITS = 256, NO_DIGIT = 256 };

// A warp has 256 consecutive pairs, 32 in each round.
__device__ __forceinline__ u64 pair_of(u32 round) {
    return (u64)blockIdx.x * SORT_TILE + threadIdx.x / 32 * 256 + round * 32 + threadIdx.x % 32;
}

__device__ __forceinline__ u32 digit_of(const SortArguments& a, u64 pair) {
    return pair < a.pairs ? (u32)(at<const u64>(a.keys)[pair] >> a.shift) & 255 : (u32)NO_DIGIT;
}

// The number of pairs with this digit that precede the lane's pair in its warp. `own` counts the warp's pairs by digit
// and is advanced by this round.
__device__ __forceinline__ u32 rank_of(u32 digit, u32* own) {
    u32 peers = __match_any_sync(0xffffffffu, digit);
    u32 lane = threadIdx.x % 32;
    u32 before = digit == NO_DIGIT ? 0 : own[digit];
    __syncwarp();
    if (digit != NO_DIGIT && (peers & ((1u << lane) - 1)) == 0) {
        own[digit] = before + __popc(peers);
    }
    __syncwarp();
    return before + __popc(peers & ((1u << lane) - 1));
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_sort_count(const __grid_constant__ SortArguments a) {
    __shared__ u32 had[WARPS][DIGITS];
    for (u32 warp = 0; warp < WARPS; warp++) {
        had[warp][threadIdx.x] = 0;
    }
    __syncthreads();
    for (u32 round = 0; round < ROUNDS; round++) {
        rank_of(digit_of(a, pair_of(round)), had[threadIdx.x / 32]);
    }
    __syncthreads();
    u32 total = 0;
    for (u32 warp = 0; warp < WARPS; warp++) {
        total += had[warp][threadIdx.x];
    }
    at<u32>(a.counts)[(u64)threadIdx.x * gridDim.x + blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_sort_scatter(const __grid_constant__ SortArguments a) {
    __shared__ u32 had[WARPS][DIGITS];
    for (u32 warp = 0; warp < WARPS; warp++) {
        had[warp][threadIdx.x] = 0;
    }
    __syncthreads();
    u32 ranks[ROUNDS];
#pragma unroll
    for (u32 round = 0; round < ROUNDS; round++) {
        ranks[round] = rank_of(digit_of(a, pair_of(round)), had[threadIdx.x / 32]);
    }
    __syncthreads();
    // The pairs of a digit follow those of lower digits and of earlier tiles; within the tile, those of earlier warps.
    u32 begin = at<const u32>(a.counts)[(u64)threadIdx.x * gridDim.x + blockIdx.x];
    for (u32 warp = 0; warp < WARPS; warp++) {
        u32 own = had[warp][threadIdx.x];
        had[warp][threadIdx.x] = begin;
        begin += own;
    }
    __syncthreads();
#pragma unroll
    for (u32 round = 0; round < ROUNDS; round++) {
        u64 pair = pair_of(round);
        u32 digit = digit_of(a, pair);
        if (digit != NO_DIGIT) {
            u32 place = had[threadIdx.x / 32][digit] + ranks[round];
            at<u64>(a.keys_after)[place] = at<const u64>(a.keys)[pair];
            at<u32>(a.places_after)[place] = a.places != 0 ? at<const u32>(a.places)[pair] : (u32)pair;
        }
    }
}

// Exclusive prefix sum of `own` over the thread block, with the sum of all in `total`. Uses 512 shared numbers.
__device__ __forceinline__ u32 before_in_block(u32 own, u32 (*sums)[256], u32& total) {
    u32 thread = threadIdx.x;
    u32 side = 0;
    sums[0][thread] = own;
    __syncthreads();
    for (u32 reach = 1; reach < 256; reach *= 2) {
        sums[1 - side][thread] = sums[side][thread] + (reach <= thread ? sums[side][thread - reach] : 0);
        side = 1 - side;
        __syncthreads();
    }
    total = sums[side][255];
    u32 before = sums[side][thread] - own;
    __syncthreads();
    return before;
}

// Exclusive prefix sum of all counts. Runs on one thread block.
extern "C" __global__ void __launch_bounds__(256, 4) pserver_scan(const __grid_constant__ ScanArguments a) {
    __shared__ u32 sums[2][256];
    if (blockIdx.x != 0) {
        return;
    }
    u32* counts = at<u32>(a.counts);
    u32 carried = 0;
    for (u64 begin = 0; begin < a.count; begin += 256 * ROUNDS) {
        u32 own[ROUNDS];
        u32 sum = 0;
#pragma unroll
        for (u32 k = 0; k < ROUNDS; k++) {
            u64 index = begin + threadIdx.x * ROUNDS + k;
            own[k] = index < a.count ? counts[index] : 0;
            sum += own[k];
        }
        u32 total;
        u32 before = carried + before_in_block(sum, sums, total);
#pragma unroll
        for (u32 k = 0; k < ROUNDS; k++) {
            u64 index = begin + threadIdx.x * ROUNDS + k;
            if (index < a.count) {
                counts[index] = before;
            }
            before += own[k];
        }
        carried += total;
    }
}

__device__ __forceinline__ bool is_head(const SortArguments& a, u64 pair) {
    const u64* keys = at<const u64>(a.keys);
    return pair < a.pairs && (pair == 0 || keys[pair] != keys[pair - 1]);
}

// The number of heads among the eight consecutive pairs of this thread.
__device__ __forceinline__ u32 heads_of(const SortArguments& a, u64 begin) {
    u32 heads = 0;
    for (u32 k = 0; k < ROUNDS; k++) {
        heads += is_head(a, begin + k);
    }
    return heads;
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_segment_count(const __grid_constant__ SortArguments a) {
    __shared__ u32 sums[2][256];
    u32 total;
    before_in_block(heads_of(a, (u64)blockIdx.x * SORT_TILE + threadIdx.x * ROUNDS), sums, total);
    if (threadIdx.x == 0) {
        at<u32>(a.counts)[blockIdx.x] = total;
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) pserver_segment_write(const __grid_constant__ SortArguments a) {
    __shared__ u32 sums[2][256];
    u64 begin = (u64)blockIdx.x * SORT_TILE + threadIdx.x * ROUNDS;
    u32 total;
    u32 place = at<const u32>(a.counts)[blockIdx.x] + before_in_block(heads_of(a, begin), sums, total);
    for (u32 k = 0; k < ROUNDS; k++) {
        if (is_head(a, begin + k)) {
            at<u64>(a.keys_after)[place] = at<const u64>(a.keys)[begin + k];
            at<u32>(a.places_after)[place] = (u32)(begin + k);
            place++;
        }
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 255) {
        *at<u32>(a.unique) = place;
        at<u32>(a.places_after)[place] = (u32)a.pairs;
    }
}
