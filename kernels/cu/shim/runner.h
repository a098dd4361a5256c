#line 1 "runner.h"

// A program that does what its standard input says, one command after the other, and answers on its standard output.
// All numbers are u64, little endian. A buffer ends at a page that nobody may touch, but for what alignment asks for;
// that rest, and what stands before the buffer, are checked when buffers are given back.

#include <sys/mman.h>
#include <unistd.h>
#include <vector>

typedef unsigned long long Number;
enum { BUFFER = 1, LAUNCH, OUTPUT, RELOCATE, RELEASE, DROP, SITES, ORDER };
enum { PAGE = 4096, BEFORE = 64, GUARD = 0xa5 };

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
    alignas(16) char arguments[1024];
    take(arguments, number() % sizeof arguments);
    for (Number left = number(); left != 0; left--) {
        relocate(arguments);
    }
    void* args[1] = {arguments};
    int failed = pserver_shim_launch(name, grid, block, 0, args);
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
    for (int site = 0; site < SHIM_SITES; site++) {
        Number line = site < pserver_shim_site_count ? pserver_shim_sites[site] : 0;
        fwrite(&line, sizeof line, 1, stdout);
    }
    fflush(stdout);
}

int main() {
    for (;;) {
        switch (number()) {
        case BUFFER: make_buffer(); break;
        case LAUNCH: launch(); break;
        case OUTPUT: output(); break;
        case RELOCATE: relocate(buffers.at(number()).begin); break;
        case RELEASE: release(); break;
        case DROP: pserver_shim_drop((int)number()); break;
        case SITES: sites(); break;
        case ORDER: pserver_shim_order(number()); break;
        default: fprintf(stderr, "pserver shim: no such command\n"); return 6;
        }
    }
}
