// A CUDA driver without a device, for tests: the functions of libcuda that `kernels::cuda` calls, over the memory of
// the host. Built as `libcuda.so`, and `libcuda.so.1` is a link to it.
//
// Streams are lists of submitted operations. An operation runs not when it is submitted, but when an event or a stream
// is queried or waited for; operations run one after another, and the next stream is drawn from a seed. So code that
// relies on an order without an event fails for some seed, in the same way each time.
//
// Checks as a driver could: each copy lies within one allocation, each object exists, pinned memory is
// given back when nothing uses it, and a context when it has no objects. A violation ends the process with a line
// that names it. The environment:
//
//   PSERVER_STANDIN_SEED=7               the order
//   PSERVER_STANDIN_MEMORY=1000000       bytes of the device
//   PSERVER_STANDIN_DEVICES=1            how many devices, each with a context; memory and streams are of the one in
//                                        whose context they were made, and with PSERVER_STANDIN_GUARD a kernel reaches
//                                        memory of its own device only
//   PSERVER_STANDIN_VERSION=12040        the driver's version
//   PSERVER_STANDIN_FAIL=cuEventQuery:3:700,...   the third call of this function returns 700; `execute` is what
//                                        streams do, and its error stays: every call returns it from then on
//   PSERVER_STANDIN_NO_WAITS=1           cuStreamWaitEvent does nothing: what a missing wait would do
//   PSERVER_STANDIN_KERNELS=/a.so:/b.so  libraries that the shim made (docs/CUDA.md)
//   PSERVER_STANDIN_LAUNCHED=/file       a line for every kernel that ran
//   PSERVER_STANDIN_GUARD=1              memory of the device is not the processor's: touching it is a segmentation
//                                        fault, outside of copies and kernels
//   PSERVER_STANDIN_KIND=3               cuPointerGetAttribute reports it as the kind of device memory, in place of 2
//   PSERVER_STANDIN_POOLED=1             it reports no context for this memory, as for that of a pool; 2: it refuses
//                                        to name the context
//   PSERVER_STANDIN_STRANGERS=201        the error for an address that was not allocated, in place of 1
//   PSERVER_STANDIN_UNPINNED=/file       a line for every copy of memory that is not pinned
//   PSERVER_STANDIN_CALLS=/file          a line for every call

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Code = unsigned;
enum : Code {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ALREADY_REGISTERED = 712,
};

[[noreturn]] void broken(const std::string& what) {
  fprintf(stderr, "stand-in driver: %s\n", what.c_str());
  abort();
}

std::string hex(uint64_t number) {
  std::ostringstream text;
  text << "0x" << std::hex << number;
  return text.str();
}

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

// Ranges of addresses, by where they begin.
struct Ranges {
  std::map<uint64_t, uint64_t> bytes;

  // Whether a range holds all of this; part of it in one and part outside is an error of the caller's.
  bool hold(uint64_t start, uint64_t length, const char* what) const {
    auto next = bytes.upper_bound(start);
    const bool reaches_next = next != bytes.end() && next->first < start + length;
    if (next != bytes.begin()) {
      auto own = std::prev(next);
      if (start + length <= own->first + own->second) return true;
      if (start < own->first + own->second) broken(std::string(what) + " leaves a range at " + hex(start));
    }
    if (reaches_next) broken(std::string(what) + " runs into a range at " + hex(start));
    return false;
  }
};

bool is_guarded() {
  static const bool is_guarded = setting("PSERVER_STANDIN_GUARD", 0) != 0;
  return is_guarded;
}

constexpr int DEVICES_MAX = 8;

struct Stream;

// The primary context of a device; there is no other.
struct Context {
  int ordinal = 0, retained = 0;
  Stream* own = nullptr;  // its default stream, from the first use on
};

// Memory of all devices.
struct Device : Ranges {
  std::map<uint64_t, int> ordinals;  // by where a range begins

  int ordinal(uint64_t address) const { return std::prev(ordinals.upper_bound(address))->second; }
};

// While this lives, the processor may access the memory of these devices (bits, by ordinal), also if it is guarded.
struct Opened {
  const Device& device;
  const unsigned which;
  Opened(const Device& device, unsigned which) : device(device), which(which) { protect(PROT_READ | PROT_WRITE); }
  ~Opened() { protect(PROT_NONE); }
  Opened(const Opened&) = delete;
  void protect(int access) const {
    if (!is_guarded()) return;
    for (const auto& range : device.bytes)
      if ((which >> device.ordinal(range.first) & 1) &&
          mprotect((void*)range.first, (range.second + 4095) / 4096 * 4096, access))
        broken("memory cannot be guarded");
  }
};

struct Event {
  uint64_t recorded = 0, happened = 0;
  double when = 0;
  bool has_time = true;
};

struct Operation {
  std::function<void()> work;
  std::shared_ptr<Event> event;  // waited for, or none
  const volatile uint64_t* word = nullptr;  // of the host, waited for until it has this value
  uint64_t value = 0;
  uint64_t version = 0;
  uint64_t host = 0, host_bytes = 0;  // the memory of the host that it reads or writes
  unsigned devices = 0;               // bits, by ordinal: those whose memory it reaches beside its stream's
};

// Kernels in order, as a capture left them.
struct Graph {
  std::vector<std::function<void()>> kernels;
};

struct Stream {
  std::deque<Operation> operations;
  uint64_t weight = 1, number = 0;
  int ordinal = 0;
  bool is_blocking = false;   // copies without a stream wait for it
  bool is_destroyed = false;  // it lives until its work is done
  std::unique_ptr<Graph> capture;  // while it is captured: what was launched, and does not run
};

// In order of creation, not by address, so that a seed always draws the same streams.
struct Earlier {
  bool operator()(const Stream* left, const Stream* right) const { return left->number < right->number; }
};

// Kernels compiled for the host: a library of `cuda::source::shim` exports these.
struct Library {
  int (*has)(const char* name) = nullptr;
  int (*launch)(const char* name, const unsigned grid[3], const unsigned block[3], unsigned shared,
                void** args) = nullptr;

  static Library load(const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) broken(dlerror());
    Library library;
    library.has = (decltype(library.has))dlsym(handle, "pserver_shim_has");
    library.launch = (decltype(library.launch))dlsym(handle, "pserver_shim_launch");
    if (!library.has || !library.launch) broken(path + " has no kernels");
    return library;
  }
};

struct Function {
  std::string name;
  Library library;
};

struct Module {
  std::vector<Library> libraries;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

// The length in bytes of a kernel's arguments, by the prefix of its name, as in kernels/src/cuda/arguments.rs.
struct Taken {
  const char* prefix;
  uint64_t bytes;
};
const Taken taken[] = {
    {"pserver_update_", 2688}, {"pserver_sum_", 2688}, {"pserver_squares_", 24}, {"pserver_total", 24},
    {"pserver_finite", 536},   {"pserver_cast", 32},   {"pserver_scalars", 64},  {"pserver_sort_", 64},
    {"pserver_segment_", 64},  {"pserver_scan", 16},   {"pserver_rows_", 864},   {"standin_", 24},
};

struct Failure {
  std::string call;
  uint64_t nth;
  Code code;
};

struct World {
  std::recursive_mutex mutex;
  std::mt19937_64 random;
  bool is_initialized = false;
  Context contexts[DEVICES_MAX];
  uint64_t used = 0, limit = 0;
  Device device;
  Ranges pinned;
  std::set<uint64_t> given;  // of the pinned ranges, those that the driver allocated
  std::set<Stream*, Earlier> streams;
  uint64_t streams_made = 0;
  std::map<void*, std::shared_ptr<Event>> events;
  std::set<Module*> modules;
  std::set<Graph*> graphs;  // also those that are made ready
  std::map<std::string, uint64_t> calls;
  std::vector<Failure> failures;
  Code sticky = SUCCESS;
  double clock = 0;
  std::vector<Library> libraries;
  // A delayed stream: it runs only while no other can.
  Stream* behind = nullptr;
  uint64_t behind_for = 0;
  std::ofstream log;

  World() {
    random.seed(setting("PSERVER_STANDIN_SEED", 1));
    for (int ordinal = 0; ordinal < DEVICES_MAX; ++ordinal) contexts[ordinal].ordinal = ordinal;
    limit = setting("PSERVER_STANDIN_MEMORY", 256 << 20);
    if (const char* path = getenv("PSERVER_STANDIN_CALLS")) log.open(path, std::ios::app);
    const char* fail = getenv("PSERVER_STANDIN_FAIL");
    std::istringstream list(fail ? fail : "");
    for (std::string one; std::getline(list, one, ',');) {
      std::istringstream parts(one);
      std::string call, nth, code;
      std::getline(parts, call, ':');
      std::getline(parts, nth, ':');
      std::getline(parts, code, ':');
      failures.push_back({call, strtoull(nth.c_str(), nullptr, 10), (Code)strtoul(code.c_str(), nullptr, 10)});
    }
    const char* libraries = getenv("PSERVER_STANDIN_KERNELS");
    std::istringstream paths(libraries ? libraries : "");
    for (std::string path; std::getline(paths, path, ':');) this->libraries.push_back(Library::load(path));
  }

  // The injected error of the call, or zero.
  Code injected(const char* call) {
    const uint64_t nth = ++calls[call];
    if (log.is_open()) log << call << std::endl;
    for (const Failure& failure : failures)
      if (failure.call == call && failure.nth == nth) return failure.code;
    return SUCCESS;
  }

  // The same, or the error that stays.
  Code called(const char* call) {
    const Code code = injected(call);
    return code ? code : sticky;
  }

  void happen(Stream* stream) {
    Operation operation = std::move(stream->operations.front());
    stream->operations.pop_front();
    clock += 1e-3;
    if (const Code code = called("execute")) {
      sticky = code;
      return;
    }
    {
      const Opened opened(device, 1u << stream->ordinal | operation.devices);
      operation.work();
    }
    if (stream->is_destroyed && stream->operations.empty()) remove(stream);
  }

  void remove(Stream* stream) {
    streams.erase(stream);
    if (behind == stream) behind = nullptr;
    delete stream;
  }

  // One operation of a stream that is drawn; false when none can go on.
  bool step() {
    std::vector<Stream*> able;
    uint64_t weights = 0;
    for (Stream* stream : streams) {
      if (stream->operations.empty()) continue;
      const Operation& head = stream->operations.front();
      if (head.event && head.event->happened < head.version) continue;
      if (head.word && *head.word != head.value) continue;
      able.push_back(stream);
      weights += stream->weight;
    }
    if (able.empty() || sticky) return false;
    if (behind_for == 0) {
      behind_for = 1 + random() % 32;
      behind = able[random() % able.size()];
    }
    --behind_for;
    if (able.size() > 1) {
      for (size_t at = 0; at < able.size(); ++at) {
        if (able[at] != behind) continue;
        weights -= behind->weight;
        able.erase(able.begin() + at);
        break;
      }
    }
    uint64_t drawn = random() % weights;
    for (Stream* stream : able) {
      if (drawn < stream->weight) {
        happen(stream);
        return true;
      }
      drawn -= stream->weight;
    }
    return true;
  }

  // A few operations, or none.
  void some() {
    for (uint64_t left = random() % 4; left > 0; --left)
      if (!step()) return;
  }

  Code until(const std::function<bool()>& is_over) {
    while (!is_over()) {
      if (sticky) return sticky;
      if (!step()) broken("streams wait for each other");
    }
    return sticky;
  }

  Code drain() {
    return until([&] {
      for (Stream* stream : streams)
        if (!stream->operations.empty()) return false;
      return true;
    });
  }

  // As a copy without a stream does: for the default stream of a context, and for those that block it.
  Code wait_for_default(const Context* context) {
    return until([&] {
      for (Stream* stream : streams)
        if ((stream->is_blocking || stream == context->own) && !stream->operations.empty()) return false;
      return true;
    });
  }

  size_t objects() const {
    size_t own = 0;
    for (const Context& context : contexts) own += context.own != nullptr;
    for (const Stream* stream : streams) own += stream->is_destroyed;
    return device.bytes.size() + pinned.bytes.size() + streams.size() - own + events.size() + modules.size() +
           graphs.size();
  }

  void check_unused(uint64_t start, uint64_t bytes) {
    for (Stream* stream : streams)
      for (const Operation& operation : stream->operations)
        if (operation.host < start + bytes && start < operation.host + operation.host_bytes)
          broken("pinned memory at " + hex(start) + " is given back while a stream uses it");
  }
};

// Never destroyed: threads may call while the process ends.
World& world() {
  static World* world = new World;
  return *world;
}

thread_local Context* current = nullptr;
// The contexts below the current one.
thread_local std::vector<Context*> beneath;

// Locks, and returns early when this call is to fail.
#define CALL_THAT_FAILS_AS(name, failing)                           \
  World& here = world();                                            \
  std::lock_guard<std::recursive_mutex> lock(here.mutex);           \
  if (const Code code = here.failing(#name)) return code;           \
  if (!here.is_initialized) return NOT_INITIALIZED;
#define CALL(name) CALL_THAT_FAILS_AS(name, called)
#define CALL_IN_CONTEXT(name) \
  CALL(name)                  \
  if (!current) return INVALID_CONTEXT;
// Calls that do not reach the device: an error that stays is not theirs.
#define CALL_BESIDE_DEVICE(name) CALL_THAT_FAILS_AS(name, injected)

Stream* new_stream(World& here) {
  Stream* stream = new Stream;
  const uint64_t weights[] = {1, 4, 100};
  stream->weight = weights[here.random() % 3];
  stream->number = here.streams_made++;
  stream->ordinal = current->ordinal;
  here.streams.insert(stream);
  return stream;
}

// None is the default one of the current context. Of a stream that is captured only kernels are taken here.
Stream* stream_of(World& here, void* handle, bool may_be_captured = false) {
  if (!handle) {
    if (!current->own) current->own = new_stream(here);
    return current->own;
  }
  for (Stream* stream : here.streams) {
    if (stream != handle || stream->is_destroyed) continue;
    if (stream->capture && !may_be_captured) broken("a stream that is captured is used for something else");
    return stream;
  }
  broken("no stream " + hex((uint64_t)handle));
}

std::shared_ptr<Event> event_of(World& here, void* handle) {
  auto found = here.events.find(handle);
  if (found == here.events.end()) broken("no event " + hex((uint64_t)handle));
  return found->second;
}

void check_device(World& here, uint64_t start, uint64_t bytes, const char* what) {
  if (!here.device.hold(start, bytes, what)) broken(std::string(what) + " outside of any allocation: " + hex(start));
}

void note_unpinned(const char* way, uint64_t bytes) {
  if (const char* path = getenv("PSERVER_STANDIN_UNPINNED"))
    std::ofstream(path, std::ios::app) << way << " " << bytes << "\n";
}

// The argument of a launch: a buffer and its length behind `extra`.
std::vector<uint64_t> packed(void** params, void** extra) {
  if (params || !extra) broken("a launch without a packed argument");
  const void* start = nullptr;
  size_t bytes = 0;
  for (void** at = extra; *at; at += 2) {
    if ((uintptr_t)*at == 1) start = at[1];
    if ((uintptr_t)*at == 2) bytes = *(size_t*)at[1];
  }
  if (!start || !bytes || bytes % 8) broken("a launch without a packed argument");
  std::vector<uint64_t> words(bytes / 8);
  memcpy(words.data(), start, bytes);
  return words;
}

// Kernels of the driver itself, which tests of streams use.
struct Fill {
  uint64_t start, words, value;
};
struct Add {
  uint64_t from, into, words;
};
// A kernel that ends when a word of the host has a value, which is judged before it runs.
const char* const UNTIL = "standin_until";
int has_own(const char* name) {
  return !strcmp(name, "standin_fill") || !strcmp(name, "standin_add") || !strcmp(name, UNTIL);
}
int launch_own(const char* name, const unsigned*, const unsigned*, unsigned, void** args) {
  if (!strcmp(name, UNTIL)) return 0;
  if (!strcmp(name, "standin_fill")) {
    const Fill fill = *(const Fill*)args[0];
    check_device(world(), fill.start, fill.words * 8, "a kernel");
    for (uint64_t at = 0; at < fill.words; ++at) ((uint64_t*)fill.start)[at] = fill.value;
    return 0;
  }
  const Add add = *(const Add*)args[0];
  check_device(world(), add.from, add.words * 8, "a kernel");
  check_device(world(), add.into, add.words * 8, "a kernel");
  for (uint64_t at = 0; at < add.words; ++at) ((uint64_t*)add.into)[at] += ((const uint64_t*)add.from)[at];
  return 0;
}

const char* name_of(Code code) {
  switch (code) {
    case SUCCESS: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NOT_INITIALIZED: return "CUDA_ERROR_NOT_INITIALIZED";
    case NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
    case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case 209: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case 214: return "CUDA_ERROR_ECC_UNCORRECTABLE";
    case 218: return "CUDA_ERROR_INVALID_PTX";
    case 222: return "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case NOT_READY: return "CUDA_ERROR_NOT_READY";
    case 700: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case 701: return "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    case ALREADY_REGISTERED: return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    case 713: return "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    case 719: return "CUDA_ERROR_LAUNCH_FAILED";
    case 801: return "CUDA_ERROR_NOT_SUPPORTED";
    default: return nullptr;
  }
}

uint64_t whole_pages(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

extern "C" {

Code cuGetErrorName(Code code, const char** text) {
  *text = name_of(code);
  return *text ? SUCCESS : INVALID_VALUE;
}

Code cuInit(unsigned flags) {
  World& here = world();
  std::lock_guard<std::recursive_mutex> lock(here.mutex);
  if (const Code code = here.called("cuInit")) return code;
  if (flags) return INVALID_VALUE;
  if (setting("PSERVER_STANDIN_DEVICES", 1) == 0) return NO_DEVICE;
  here.is_initialized = true;
  return SUCCESS;
}

Code cuDriverGetVersion(int* version) {
  *version = (int)setting("PSERVER_STANDIN_VERSION", 12040);
  return world().injected("cuDriverGetVersion");
}

Code cuDeviceGetCount(int* count) {
  CALL_BESIDE_DEVICE(cuDeviceGetCount)
  *count = (int)setting("PSERVER_STANDIN_DEVICES", 1);
  if (*count > DEVICES_MAX) broken("more devices than there are");
  return SUCCESS;
}

Code cuDeviceGet(int* device, int ordinal) {
  CALL_BESIDE_DEVICE(cuDeviceGet)
  if (ordinal < 0 || ordinal >= (int)setting("PSERVER_STANDIN_DEVICES", 1)) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

Code cuDeviceGetName(char* name, int length, int) {
  CALL_BESIDE_DEVICE(cuDeviceGetName)
  snprintf(name, length, "stand-in");
  return SUCCESS;
}

Code cuDeviceGetAttribute(int* value, int attribute, int) {
  CALL_BESIDE_DEVICE(cuDeviceGetAttribute)
  switch (attribute) {
    case 75: *value = 9; break;   // compute capability, major
    case 76: *value = 0; break;   // minor
    case 16: *value = 4; break;   // multiprocessors
    case 113: *value = 1; break;  // memory that is read-only can be registered
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}

Code cuDeviceTotalMem_v2(size_t* bytes, int) {
  CALL_BESIDE_DEVICE(cuDeviceTotalMem_v2)
  *bytes = here.limit;
  return SUCCESS;
}

Code cuDevicePrimaryCtxRetain(void** context, int ordinal) {
  CALL_BESIDE_DEVICE(cuDevicePrimaryCtxRetain)
  ++here.contexts[ordinal].retained;
  *context = &here.contexts[ordinal];
  return SUCCESS;
}

Code cuDevicePrimaryCtxRelease_v2(int ordinal) {
  CALL_BESIDE_DEVICE(cuDevicePrimaryCtxRelease_v2)
  if (--here.contexts[ordinal].retained == 0)
    for (const auto& range : here.device.ordinals)
      if (range.second == ordinal && !here.sticky) broken("a context is released with memory of its device");
  for (const Context& context : here.contexts)
    if (context.retained > 0) return SUCCESS;
  // What cannot be given back after an error that stays goes with the context.
  if (here.objects() > 0 && !here.sticky) broken("a context is released with " + std::to_string(here.objects()) + " objects");
  return SUCCESS;
}

Code cuCtxSetCurrent(void* context) {
  CALL_BESIDE_DEVICE(cuCtxSetCurrent)
  if (context && !((Context*)context)->retained) broken("a context that was released is made current");
  current = (Context*)context;
  return SUCCESS;
}

Code cuCtxPushCurrent_v2(void* context) {
  CALL_BESIDE_DEVICE(cuCtxPushCurrent_v2)
  if (!context || !((Context*)context)->retained) return INVALID_CONTEXT;
  beneath.push_back(current);
  current = (Context*)context;
  return SUCCESS;
}

Code cuCtxPopCurrent_v2(void** context) {
  CALL_BESIDE_DEVICE(cuCtxPopCurrent_v2)
  if (beneath.empty()) broken("a context is popped that was not pushed");
  // A caller that pushes a context leaves no copy in flight: the owner may free the memory of the copy.
  if (current->own)
    for (const Operation& operation : current->own->operations)
      if (operation.devices) broken("a context is popped with a copy on its way");
  *context = current;
  current = beneath.back();
  beneath.pop_back();
  return SUCCESS;
}

// Needs no context: addresses are one space.
Code cuPointerGetAttribute(void* data, int attribute, uint64_t pointer) {
  CALL(cuPointerGetAttribute)
  for (const Ranges* ranges : {static_cast<const Ranges*>(&here.device), static_cast<const Ranges*>(&here.pinned)}) {
    const auto next = ranges->bytes.upper_bound(pointer);
    if (next == ranges->bytes.begin()) continue;
    const auto own = std::prev(next);
    if (own->first + own->second <= pointer) continue;
    const bool is_device = ranges == &here.device;
    switch (attribute) {
      case 1:
        if (setting("PSERVER_STANDIN_POOLED", 0) == 2) return INVALID_VALUE;
        *(void**)data =
            setting("PSERVER_STANDIN_POOLED", 0) || !is_device ? nullptr : &here.contexts[here.device.ordinal(pointer)];
        break;
      case 2: *(unsigned*)data = is_device ? (unsigned)setting("PSERVER_STANDIN_KIND", 2) : 1; break;
      case 8: *(bool*)data = false; break;
      case 9: *(int*)data = is_device ? here.device.ordinal(pointer) : 0; break;
      case 11: *(uint64_t*)data = own->first; break;
      case 12: *(size_t*)data = own->second; break;
      default: broken("an attribute of a pointer that is not known: " + std::to_string(attribute));
    }
    return SUCCESS;
  }
  return (Code)setting("PSERVER_STANDIN_STRANGERS", INVALID_VALUE);
}

Code cuMemGetInfo_v2(size_t* free, size_t* total) {
  CALL_IN_CONTEXT(cuMemGetInfo_v2)
  *free = here.limit - here.used;
  *total = here.limit;
  return SUCCESS;
}

Code cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  CALL_IN_CONTEXT(cuMemAlloc_v2)
  if (!bytes) return INVALID_VALUE;
  if (here.limit - here.used < bytes) return OUT_OF_MEMORY;
  // The allocation ends where nothing is mapped, so that a kernel that runs over its end is stopped.
  const uint64_t pages = whole_pages(bytes);
  char* start = (char*)mmap(nullptr, pages + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(start, pages, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
  memset(start, 0xa5, pages);
  if (is_guarded() && mprotect(start, pages, PROT_NONE)) return OUT_OF_MEMORY;
  here.used += bytes;
  here.device.bytes[(uint64_t)start] = bytes;
  here.device.ordinals[(uint64_t)start] = current->ordinal;
  *address = (uint64_t)start;
  return SUCCESS;
}

Code cuMemFree_v2(uint64_t address) {
  CALL_IN_CONTEXT(cuMemFree_v2)
  auto found = here.device.bytes.find(address);
  if (found == here.device.bytes.end()) broken("memory of the device is freed that is none: " + hex(address));
  if (const Code code = here.drain()) return code;
  here.used -= found->second;
  munmap((void*)address, whole_pages(found->second) + 4096);
  here.device.bytes.erase(found);
  here.device.ordinals.erase(address);
  return SUCCESS;
}

Code cuMemHostAlloc(void** start, size_t bytes, unsigned flags) {
  CALL_IN_CONTEXT(cuMemHostAlloc)
  if (!bytes) return INVALID_VALUE;
  if (flags & 4) broken("write-combined memory, which the processor reads slowly");
  *start = aligned_alloc(4096, whole_pages(bytes));
  if (!*start) return OUT_OF_MEMORY;
  here.pinned.bytes[(uint64_t)*start] = bytes;
  here.given.insert((uint64_t)*start);
  return SUCCESS;
}

Code cuMemFreeHost(void* start) {
  CALL_IN_CONTEXT(cuMemFreeHost)
  if (!here.given.erase((uint64_t)start)) broken("pinned memory is freed that is none: " + hex((uint64_t)start));
  here.check_unused((uint64_t)start, here.pinned.bytes[(uint64_t)start]);
  here.pinned.bytes.erase((uint64_t)start);
  free(start);
  return SUCCESS;
}

// Whether all of this is memory of the process, and whether all of it can be written.
struct Mapped {
  bool is_there = false, is_writable = true;
  Mapped(uint64_t start, uint64_t bytes) {
    std::ifstream maps("/proc/self/maps");
    uint64_t reached = start;
    for (std::string line; std::getline(maps, line);) {
      uint64_t low = 0, high = 0;
      char may_read = 0, may_write = 0;
      if (sscanf(line.c_str(), "%lx-%lx %c%c", &low, &high, &may_read, &may_write) != 4) continue;
      if (high <= reached || reached < low || may_read != 'r') continue;
      is_writable = is_writable && may_write == 'w';
      reached = high;
      if (start + bytes <= reached) {
        is_there = true;
        return;
      }
    }
  }
};

Code cuMemHostRegister_v2(void* start, size_t bytes, unsigned flags) {
  CALL_IN_CONTEXT(cuMemHostRegister_v2)
  const bool is_read_only = flags & 8;
  const Mapped mapped((uint64_t)start, bytes);
  if (!bytes || !mapped.is_there || !(mapped.is_writable || is_read_only)) return INVALID_VALUE;
  auto next = here.pinned.bytes.lower_bound((uint64_t)start);
  if (next != here.pinned.bytes.end() && next->first < (uint64_t)start + bytes) return ALREADY_REGISTERED;
  if (next != here.pinned.bytes.begin()) {
    auto before = std::prev(next);
    if ((uint64_t)start < before->first + before->second) return ALREADY_REGISTERED;
  }
  here.pinned.bytes[(uint64_t)start] = bytes;
  return SUCCESS;
}

Code cuMemHostUnregister(void* start) {
  CALL_IN_CONTEXT(cuMemHostUnregister)
  auto found = here.pinned.bytes.find((uint64_t)start);
  if (found == here.pinned.bytes.end() || here.given.count((uint64_t)start))
    broken("memory is unregistered that was not registered: " + hex((uint64_t)start));
  here.check_unused((uint64_t)start, found->second);
  here.pinned.bytes.erase(found);
  return SUCCESS;
}

// These two take no stream: they wait for the default one, and for no stream of the caller's that is non-blocking.
Code cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  CALL_IN_CONTEXT(cuMemcpyHtoD_v2)
  check_device(here, to, bytes, "a copy to the device");
  if (!here.pinned.hold((uint64_t)from, bytes, "a copy from the host")) note_unpinned("to the device", bytes);
  if (const Code code = here.wait_for_default(current)) return code;
  const Opened opened(here.device, 1u << here.device.ordinal(to));
  memcpy((void*)to, from, bytes);
  return SUCCESS;
}

Code cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  CALL_IN_CONTEXT(cuMemcpyDtoH_v2)
  check_device(here, from, bytes, "a copy from the device");
  if (!here.pinned.hold((uint64_t)to, bytes, "a copy to the host")) note_unpinned("from the device", bytes);
  if (const Code code = here.wait_for_default(current)) return code;
  const Opened opened(here.device, 1u << here.device.ordinal(from));
  memcpy(to, (const void*)from, bytes);
  return SUCCESS;
}

Code cuMemcpyPeerAsync(uint64_t to, void* into, uint64_t from, void* out, size_t bytes, void* stream) {
  CALL_IN_CONTEXT(cuMemcpyPeerAsync)
  check_device(here, to, bytes, "a copy between devices");
  check_device(here, from, bytes, "a copy between devices");
  const int target = here.device.ordinal(to), source = here.device.ordinal(from);
  if (into != &here.contexts[target] || out != &here.contexts[source])
    broken("a copy between devices in contexts that are not those of its memory");
  Operation operation;
  operation.devices = 1u << target | 1u << source;
  operation.work = [=] { memmove((void*)to, (const void*)from, bytes); };
  stream_of(here, stream)->operations.push_back(std::move(operation));
  return SUCCESS;
}

static void copy_in(World& here, uint64_t to, const void* from, size_t bytes, void* stream) {
  check_device(here, to, bytes, "a copy to the device");
  Operation operation;
  if (here.pinned.hold((uint64_t)from, bytes, "a copy from the host")) {
    operation.host = (uint64_t)from, operation.host_bytes = bytes;
    operation.work = [=] { memcpy((void*)to, from, bytes); };
  } else {
    note_unpinned("to the device", bytes);
    // As the driver does: the bytes are staged before the call returns.
    auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    operation.work = [=] { memcpy((void*)to, staged->data(), bytes); };
  }
  stream_of(here, stream)->operations.push_back(std::move(operation));
}

// Whether the memory of the host is pinned.
static bool copy_out(World& here, void* to, uint64_t from, size_t bytes, void* stream) {
  check_device(here, from, bytes, "a copy from the device");
  const bool is_pinned = here.pinned.hold((uint64_t)to, bytes, "a copy to the host");
  if (!is_pinned) note_unpinned("from the device", bytes);
  Operation operation;
  operation.host = (uint64_t)to, operation.host_bytes = bytes;
  operation.work = [=] { memcpy(to, (const void*)from, bytes); };
  stream_of(here, stream)->operations.push_back(std::move(operation));
  return is_pinned;
}

Code cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  CALL_IN_CONTEXT(cuMemcpyHtoDAsync_v2)
  copy_in(here, to, from, bytes, stream);
  return SUCCESS;
}

struct CopyAttributes {
  unsigned order;
  int hints[4];
  unsigned flags;
};

Code cuMemcpyBatchAsync_v2(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                           size_t* indices, size_t kinds, void* stream) {
  CALL_IN_CONTEXT(cuMemcpyBatchAsync_v2)
  // The first attributes are those of the first copy; in the order of the stream, as ours are.
  if (!count || !stream || !kinds || count < kinds || indices[0] != 0) return INVALID_VALUE;
  if (kinds != 1 || attributes->order != 1 || attributes->flags) broken("attributes of a batch");
  // Copies of a batch have no order among themselves.
  for (size_t one = count; one-- > 0;) {
    const bool goes_in = here.device.hold(to[one], bytes[one], "a copy of a batch");
    if (!here.pinned.hold(goes_in ? from[one] : to[one], bytes[one], "a copy of a batch"))
      broken("a batch of memory that is not pinned");
    if (goes_in)
      copy_in(here, to[one], (const void*)from[one], bytes[one], stream);
    else
      copy_out(here, (void*)to[one], from[one], bytes[one], stream);
  }
  return SUCCESS;
}

Code cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  CALL_IN_CONTEXT(cuMemcpyDtoHAsync_v2)
  const bool is_pinned = copy_out(here, to, from, bytes, stream);
  Stream* own = stream_of(here, stream);
  // As the driver does: into memory that is not pinned a copy is over when the call returns.
  return is_pinned ? SUCCESS : here.until([&] { return own->operations.empty(); });
}

Code cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  CALL_IN_CONTEXT(cuMemcpyDtoDAsync_v2)
  check_device(here, to, bytes, "a copy within the device");
  check_device(here, from, bytes, "a copy within the device");
  Operation operation;
  operation.work = [=] { memmove((void*)to, (const void*)from, bytes); };
  stream_of(here, stream)->operations.push_back(std::move(operation));
  return SUCCESS;
}

Code cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, void* stream) {
  CALL_IN_CONTEXT(cuMemsetD8Async)
  check_device(here, to, bytes, "a fill");
  Operation operation;
  operation.work = [=] { memset((void*)to, byte, bytes); };
  stream_of(here, stream)->operations.push_back(std::move(operation));
  return SUCCESS;
}

Code cuStreamCreate(void** handle, unsigned flags) {
  CALL_IN_CONTEXT(cuStreamCreate)
  if (flags > 1) return INVALID_VALUE;
  Stream* stream = new_stream(here);
  stream->is_blocking = !flags;
  *handle = stream;
  return SUCCESS;
}

Code cuStreamDestroy_v2(void* handle) {
  CALL_IN_CONTEXT(cuStreamDestroy_v2)
  Stream* stream = stream_of(here, handle);
  if (stream->operations.empty()) {
    here.remove(stream);
  } else {
    stream->is_destroyed = true;
  }
  return SUCCESS;
}

Code cuStreamSynchronize(void* handle) {
  CALL_IN_CONTEXT(cuStreamSynchronize)
  Stream* stream = stream_of(here, handle);
  return here.until([&] { return stream->operations.empty(); });
}

Code cuStreamWaitEvent(void* handle, void* event, unsigned) {
  CALL_IN_CONTEXT(cuStreamWaitEvent)
  if (setting("PSERVER_STANDIN_NO_WAITS", 0)) return SUCCESS;
  Operation operation;
  operation.event = event_of(here, event);
  operation.version = operation.event->recorded;
  operation.work = [] {};
  stream_of(here, handle)->operations.push_back(std::move(operation));
  return SUCCESS;
}

Code cuEventCreate(void** handle, unsigned flags) {
  CALL_IN_CONTEXT(cuEventCreate)
  if (flags > 3) return INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->has_time = !(flags & 2);
  here.events[event.get()] = event;
  *handle = event.get();
  return SUCCESS;
}

Code cuEventDestroy_v2(void* handle) {
  CALL_IN_CONTEXT(cuEventDestroy_v2)
  event_of(here, handle);
  here.events.erase(handle);
  return SUCCESS;
}

Code cuEventRecord(void* handle, void* stream) {
  CALL_IN_CONTEXT(cuEventRecord)
  auto event = event_of(here, handle);
  const uint64_t version = ++event->recorded;
  Operation operation;
  operation.work = [event, version, &here] {
    if (event->happened < version) event->happened = version;
    event->when = here.clock;
  };
  stream_of(here, stream)->operations.push_back(std::move(operation));
  return SUCCESS;
}

Code cuEventQuery(void* handle) {
  CALL_IN_CONTEXT(cuEventQuery)
  auto event = event_of(here, handle);
  here.some();
  if (here.sticky) return here.sticky;
  return event->happened == event->recorded ? SUCCESS : NOT_READY;
}

Code cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  CALL_IN_CONTEXT(cuEventElapsedTime)
  auto first = event_of(here, start), last = event_of(here, end);
  for (const auto& event : {first, last})
    if (!event->has_time || !event->recorded) return INVALID_HANDLE;
  if (first->happened != first->recorded || last->happened != last->recorded) return NOT_READY;
  *milliseconds = (float)((last->when - first->when) * 1e3);
  return SUCCESS;
}

Code cuModuleLoadData(void** handle, const void* image) {
  CALL_IN_CONTEXT(cuModuleLoadData)
  const char* text = (const char*)image;
  const std::string library = "PSERVER STAND-IN ";  // what the stand-in compiler makes: the path of a library
  auto module = std::make_unique<Module>();
  if (library.compare(0, library.size(), text, strnlen(text, library.size())) == 0) {
    module->libraries.push_back(Library::load(text + library.size()));
  } else if (memcmp(text, "\177ELF", 4) == 0 || strstr(text, ".version")) {
    module->libraries = here.libraries;
    Library own;
    own.has = has_own, own.launch = launch_own;
    module->libraries.push_back(own);
  } else {
    return INVALID_IMAGE;
  }
  here.modules.insert(module.get());
  *handle = module.release();
  return SUCCESS;
}

Code cuModuleUnload(void* handle) {
  CALL_IN_CONTEXT(cuModuleUnload)
  Module* module = (Module*)handle;
  if (!here.modules.erase(module)) broken("no module " + hex((uint64_t)handle));
  if (const Code code = here.drain()) return code;
  delete module;  // its library stays, as libraries do here
  return SUCCESS;
}

Code cuModuleGetFunction(void** function, void* handle, const char* name) {
  CALL_IN_CONTEXT(cuModuleGetFunction)
  Module* module = (Module*)handle;
  if (!here.modules.count(module)) broken("no module " + hex((uint64_t)handle));
  for (const Library& library : module->libraries) {
    if (!library.has(name)) continue;
    auto& known = module->functions[name];
    if (!known) known = std::make_unique<Function>(Function{name, library});
    *function = known.get();
    return SUCCESS;
  }
  return NOT_FOUND;
}

Code cuLaunchKernel(void* handle, unsigned x, unsigned y, unsigned z, unsigned wide, unsigned high, unsigned deep,
                    unsigned shared, void* stream, void** params, void** extra) {
  CALL_IN_CONTEXT(cuLaunchKernel)
  if (!x || !y || !z || !wide || !high || !deep) return INVALID_VALUE;
  if (y > 65535 || z > 65535 || (uint64_t)wide * high * deep > 1024) return INVALID_VALUE;
  const Function* function = (const Function*)handle;
  std::vector<uint64_t> words = packed(params, extra);
  for (const Taken& known : taken)
    if (function->name.rfind(known.prefix, 0) == 0 && words.size() * 8 != known.bytes)
      broken(function->name + " takes " + std::to_string(known.bytes) + " bytes and was handed " +
             std::to_string(words.size() * 8));
  Operation operation;
  operation.work = [=, name = function->name, launch = function->library.launch]() mutable {
    const unsigned grid[3] = {x, y, z}, block[3] = {wide, high, deep};
    void* argument = words.data();
    if (launch(name.c_str(), grid, block, shared, &argument)) broken(name + " could not be launched");
    if (const char* path = getenv("PSERVER_STANDIN_LAUNCHED")) {
      static FILE* file = fopen(path, "a");
      if (!file || fprintf(file, "%s\n", name.c_str()) < 0 || fflush(file)) broken(std::string("cannot write ") + path);
    }
  };
  if (function->name == UNTIL) operation.word = (const volatile uint64_t*)words[0], operation.value = words[1];
  Stream* own = stream_of(here, stream, true);
  if (own->capture) {
    own->capture->kernels.push_back(std::move(operation.work));
  } else {
    own->operations.push_back(std::move(operation));
  }
  return SUCCESS;
}

Code cuStreamBeginCapture_v2(void* handle, unsigned mode) {
  CALL_IN_CONTEXT(cuStreamBeginCapture_v2)
  if (mode > 2) return INVALID_VALUE;
  stream_of(here, handle)->capture = std::make_unique<Graph>();
  return SUCCESS;
}

Code cuStreamEndCapture(void* handle, void** graph) {
  CALL_IN_CONTEXT(cuStreamEndCapture)
  Stream* stream = stream_of(here, handle, true);
  if (!stream->capture) broken("a capture ends that did not begin");
  *graph = stream->capture.release();
  here.graphs.insert((Graph*)*graph);
  return SUCCESS;
}

Graph* graph_of(World& here, void* handle) {
  if (!here.graphs.count((Graph*)handle)) broken("no graph " + hex((uint64_t)handle));
  return (Graph*)handle;
}

Code cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long) {
  CALL_IN_CONTEXT(cuGraphInstantiateWithFlags)
  *ready = new Graph(*graph_of(here, graph));
  here.graphs.insert((Graph*)*ready);
  return SUCCESS;
}

Code cuGraphLaunch(void* ready, void* stream) {
  CALL_IN_CONTEXT(cuGraphLaunch)
  for (const auto& kernel : graph_of(here, ready)->kernels) {
    Operation operation;
    operation.work = kernel;
    stream_of(here, stream)->operations.push_back(std::move(operation));
  }
  return SUCCESS;
}

Code cuGraphDestroy(void* graph) {
  CALL_IN_CONTEXT(cuGraphDestroy)
  here.graphs.erase(graph_of(here, graph));
  delete (Graph*)graph;
  return SUCCESS;
}

Code cuGraphExecDestroy(void* ready) { return cuGraphDestroy(ready); }

}  // extern "C"
