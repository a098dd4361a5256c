// A program that runs kernels of a library that the shim made; its argument is the path of the library. It reads
// commands from standard input and writes answers to standard output.
// All numbers are u64, little endian. A buffer ends at an inaccessible page, except for padding;
// that rest, and what stands before the buffer, are checked when buffers are given back.

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// Exports of the library (docs/CUDA.md).
static int (*shim_launch)(const char*, const unsigned[3], const unsigned[3], unsigned, void**);
static void (*shim_order)(unsigned long long);
static void (*shim_drop)(int);
static int (*shim_barriers)(int*, int);
static int (*shim_has)(const char*);

typedef unsigned long long Number;
enum { BUFFER = 1, LAUNCH, OUTPUT, RELEASE = 5, DROP, SITES, ORDER, HAS };
enum { PAGE = 4096, BEFORE = 64, GUARD = 0xa5, SITES_MAX = 64 };

struct Buffer {
    char *map, *begin;
    size_t mapped, bytes;
};
static std::vector<Buffer> buffers;

static void take(void* into, size_t bytes) {
    if (bytes != 0 && fread(into, 1, bytes, stdin) != bytes) {
        exit(0);
    }
}

static Number number() {
    Number value;
    take(&value, sizeof value);
    return value;
}

static void make_buffer() {
    Number bytes = number(), align = number();
    Buffer buffer;
    size_t pages = (bytes + BEFORE + 32 + PAGE - 1) / PAGE * PAGE;
    buffer.mapped = pages + PAGE, buffer.bytes = bytes;
    buffer.map = (char*)mmap(nullptr, buffer.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer.map == MAP_FAILED || mprotect(buffer.map + pages, PAGE, PROT_NONE) != 0) {
        perror("pserver shim: memory");
        exit(4);
    }
    memset(buffer.map, GUARD, pages);
    Number end = (Number)(buffer.map + pages);
    buffer.begin = (char*)((end - bytes - align) / 16 * 16 + align);
    take(buffer.begin, bytes);
    buffers.push_back(buffer);
}

static void release() {
    for (const Buffer& buffer : buffers) {
        const char* end = buffer.map + buffer.mapped - PAGE;
        for (const char* byte = buffer.map; byte < end; byte++) {
            bool is_outside = byte < buffer.begin || buffer.begin + buffer.bytes <= byte;
            if (is_outside && *byte != (char)GUARD) {
                fprintf(stderr, "pserver shim: wrote at %td of a buffer of %zu bytes\n", byte - buffer.begin, buffer.bytes);
                exit(3);
            }
        }
        munmap(buffer.map, buffer.mapped);
    }
    buffers.clear();
}

static void relocate(char* into) {
    Number offset = number(), buffer = number(), within = number();
    Number address = (Number)(buffers.at(buffer).begin + within);
    memcpy(into + offset, &address, sizeof address);
}

static void launch() {
    char name[128] = {};
    take(name, number() % sizeof name);
    unsigned grid[3] = {(unsigned)number(), (unsigned)number(), 1}, block[3] = {256, 1, 1};
    alignas(16) char arguments[4096];
    take(arguments, number() % sizeof arguments);
    for (Number left = number(); left != 0; left--) {
        relocate(arguments);
    }
    void* args[1] = {arguments};
    int failed = shim_launch(name, grid, block, 0, args);
    if (failed != 0) {
        fprintf(stderr, "pserver shim: %s does not launch: %d\n", name, failed);
        exit(5);
    }
}

static void output() {
    const Buffer& buffer = buffers.at(number());
    fwrite(buffer.begin, 1, buffer.bytes, stdout);
    fflush(stdout);
}

static void sites() {
    int lines[SITES_MAX] = {};
    int count = shim_barriers(lines, SITES_MAX);
    if (SITES_MAX <= count) {
        fprintf(stderr, "pserver shim: %d barriers; expected fewer than %d\n", count, SITES_MAX);
        exit(7);
    }
    for (int line : lines) {
        Number wide = (Number)line;
        fwrite(&wide, sizeof wide, 1, stdout);
    }
    fflush(stdout);
}

static void has() {
    char name[128] = {};
    take(name, number() % sizeof name);
    Number found = (Number)shim_has(name);
    fwrite(&found, sizeof found, 1, stdout);
    fflush(stdout);
}

template <typename Function> static void find(void* library, const char* name, Function& function) {
    function = (Function)dlsym(library, name);
    if (function == nullptr) {
        fprintf(stderr, "pserver shim: %s\n", dlerror());
        exit(8);
    }
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        fprintf(stderr, "pserver shim: %s\n", dlerror());
        return 8;
    }
    find(library, "pserver_shim_launch", shim_launch);
    find(library, "pserver_shim_order", shim_order);
    find(library, "pserver_shim_drop", shim_drop);
    find(library, "pserver_shim_barriers", shim_barriers);
    find(library, "pserver_shim_has", shim_has);
    for (;;) {
        switch (number()) {
        case BUFFER: make_buffer(); break;
        case LAUNCH: launch(); break;
        case OUTPUT: output(); break;
        case RELEASE: release(); break;
        case DROP: shim_drop((int)number()); break;
        case SITES: sites(); break;
        case ORDER: shim_order(number()); break;
        case HAS: has(); break;
        default: fprintf(stderr, "pserver shim: no such command\n"); return 6;
        }
    }
}
