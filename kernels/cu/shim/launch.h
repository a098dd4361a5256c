#line 1 "launch.h"

// Launch of a kernel: runs blocks one after the other, and the fibers of a block until all have ended.

extern char __start_pserver_shared[], __stop_pserver_shared[];
static __attribute__((section("pserver_shared"), used)) char pserver_shim_shared[16];

static std::mutex pserver_shim_mutex;
static unsigned long long pserver_shim_seed;
static char* pserver_shim_stacks;
static ucontext_t pserver_shim_contexts[SHIM_THREADS], pserver_shim_beginning;
static PserverShimCall pserver_shim_kernel;
static const void* pserver_shim_arguments;

// A fiber is reused by all launches: it runs one thread after another to its end.
static void pserver_shim_fiber() {
    for (;;) {
        unsigned self = threadIdx.x;
        pserver_shim_kernel(pserver_shim_arguments);
        threadIdx.x = self;
        pserver_shim_threads[self].is_begun = true;
        pserver_shim_wait(ENDED, 0, 0);
    }
}

static void pserver_shim_resume(unsigned thread) {
    threadIdx.x = thread;
    PserverShimThread& state = pserver_shim_threads[thread];
    state.wait = RUNS;
    if (_setjmp(pserver_shim_scheduler) != 0) {
        return;
    }
    if (state.is_begun) {
        _longjmp(state.resume, 1);
    }
    state.is_begun = true;
    ucontext_t& context = pserver_shim_contexts[thread];
    getcontext(&context);
    context.uc_stack.ss_sp = pserver_shim_stacks + (size_t)thread * SHIM_STACK_BYTES;
    context.uc_stack.ss_size = SHIM_STACK_BYTES;
    context.uc_link = &pserver_shim_beginning;
    makecontext(&context, pserver_shim_fiber, 0);
    setcontext(&context);
}

// `0..count` forwards, backwards, or shuffled.
static void pserver_shim_permute(unsigned* order, unsigned count, unsigned long long& random) {
    for (unsigned k = 0; k < count; k++) {
        order[k] = pserver_shim_seed == 1 ? count - 1 - k : k;
    }
    for (unsigned k = count; 1 < k && 1 < pserver_shim_seed; k--) {
        random = random * 0x5851f42d4c957f2dull + 0x14057b7ef767814full;
        unsigned other = (unsigned)((random >> 33) % k), kept = order[k - 1];
        order[k - 1] = order[other], order[other] = kept;
    }
}

// Runs the lanes of a warp until all have ended or wait for the block: no warp waits for another before that.
static void pserver_shim_warp(unsigned first, unsigned lanes, unsigned long long& random) {
    unsigned order[32];
    for (;;) {
        pserver_shim_permute(order, lanes, random);
        for (unsigned k = 0; k < lanes; k++) {
            if (pserver_shim_threads[first + order[k]].wait == RUNS) {
                pserver_shim_resume(first + order[k]);
            }
        }
        unsigned at_warp = 0, at_one_line = 0;
        for (unsigned lane = 0; lane < lanes; lane++) {
            at_warp += pserver_shim_threads[first + lane].wait == AT_WARP;
            at_one_line += pserver_shim_threads[first + lane].line == pserver_shim_threads[first].line;
        }
        if (at_warp == 0) {
            return;
        }
        if (at_warp != lanes || at_one_line != lanes) {
            pserver_shim_stop("lanes of a warp go different ways", pserver_shim_threads[first].line);
        }
        for (unsigned lane = 0; lane < lanes; lane++) {
            pserver_shim_threads[first + lane].wait = RUNS;
        }
    }
}

static void pserver_shim_block(unsigned threads, unsigned long long& random) {
    unsigned order[SHIM_THREADS / 32];
    memset(__start_pserver_shared, 0xff, (size_t)(__stop_pserver_shared - __start_pserver_shared));
    for (unsigned thread = 0; thread < threads; thread++) {
        pserver_shim_threads[thread].wait = RUNS;
    }
    for (;;) {
        pserver_shim_permute(order, threads / 32, random);
        for (unsigned k = 0; k < threads / 32; k++) {
            pserver_shim_warp(order[k] * 32, 32, random);
        }
        unsigned ended = 0, at_one_line = 0;
        for (unsigned thread = 0; thread < threads; thread++) {
            ended += pserver_shim_threads[thread].wait == ENDED;
            at_one_line += pserver_shim_threads[thread].line == pserver_shim_threads[0].line;
        }
        if (ended == threads) {
            return;
        }
        if (ended != 0 || at_one_line != threads) {
            pserver_shim_stop("a barrier that not all threads reach", pserver_shim_threads[0].line);
        }
        for (unsigned thread = 0; thread < threads; thread++) {
            pserver_shim_threads[thread].wait = RUNS;
        }
    }
}

extern "C" void pserver_shim_order(unsigned long long order) {
    std::lock_guard<std::mutex> guard(pserver_shim_mutex);
    pserver_shim_seed = order;
}

// Leaves out the barrier at this line of the module, for tests; zero leaves out none.
extern "C" void pserver_shim_drop(int line) {
    std::lock_guard<std::mutex> guard(pserver_shim_mutex);
    pserver_shim_dropped = line;
}

// The lines of the barriers that were run, at most so many; how many there are.
extern "C" int pserver_shim_barriers(int* lines, int most) {
    std::lock_guard<std::mutex> guard(pserver_shim_mutex);
    for (int site = 0; site < pserver_shim_site_count && site < most; site++) {
        lines[site] = pserver_shim_sites[site];
    }
    return pserver_shim_site_count;
}

static PserverShimCall pserver_shim_find(const char* name) {
    for (const PserverShimKernel& kernel : pserver_shim_kernels) {
        if (strcmp(kernel.name, name) == 0) {
            return kernel.call;
        }
    }
    return nullptr;
}

extern "C" int pserver_shim_has(const char* name) {
    return pserver_shim_find(name) != nullptr;
}

extern "C" int pserver_shim_launch(
    const char* name, const unsigned grid[3], const unsigned block[3], unsigned shared, void** args) {
    PserverShimCall kernel = pserver_shim_find(name);
    if (kernel == nullptr) {
        return 1;
    }
    bool is_possible = grid[0] != 0 && grid[1] != 0 && grid[2] == 1 && block[1] == 1 && block[2] == 1;
    if (!is_possible || block[0] != 256 || shared != 0) {
        return 2;
    }
    std::lock_guard<std::mutex> guard(pserver_shim_mutex);
    if (pserver_shim_stacks == nullptr) {
        pserver_shim_stacks = (char*)malloc((size_t)SHIM_THREADS * SHIM_STACK_BYTES);
    }
    pserver_shim_kernel = kernel, pserver_shim_arguments = args[0];
    blockDim = {block[0], 1, 1}, gridDim = {grid[0], grid[1], 1};
    unsigned long long random = pserver_shim_seed;
    unsigned blocks = grid[0] * grid[1];
    unsigned* order = (unsigned*)malloc(blocks * sizeof(unsigned));
    pserver_shim_permute(order, blocks, random);
    for (unsigned k = 0; k < blocks; k++) {
        blockIdx = {order[k] % grid[0], order[k] / grid[0], 0};
        pserver_shim_block(block[0], random);
    }
    free(order);
    return 0;
}
