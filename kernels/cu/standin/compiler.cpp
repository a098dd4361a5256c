// A compiler of CUDA texts without CUDA, for tests: the functions of libnvrtc that `kernels::cuda` calls. Built as
// `libnvrtc.so`. What it makes of a text is the path of a library that g++ made of the same text and the shim, in a
// form that the stand-in driver loads. The environment:
//
//   PSERVER_STANDIN_SHIM=/folder    where shim.h and launch.h are
//   PSERVER_STANDIN_FOLDER=/folder  where libraries go; one that is there already is taken as it is
//   PSERVER_STANDIN_COMPILED=/file  a line for every compilation
//   PSERVER_STANDIN_NVRTC=12        its major version

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <unistd.h>

namespace {

struct Program {
  std::string text, log, image;
};

enum : unsigned { SUCCESS = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };

std::string setting(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The text, and the names with which the shim finds the kernels.
std::string shimmed(const std::string& text) {
  const std::string folder = setting("PSERVER_STANDIN_SHIM");
  std::string all = read(folder + "/shim.h") + text + "\nstatic const PserverShimKernel pserver_shim_kernels[] = {\n";
  const std::regex kernel(
      "extern \"C\" __global__ void\\s+(?:__launch_bounds__\\([^)]*\\)\\s+)?(\\w+)\\(\\s*const "
      "__grid_constant__ (\\w+) a\\)");
  for (std::sregex_iterator found(text.begin(), text.end(), kernel), end; found != end; ++found)
    all += "    {\"" + found->str(1) + "\", pserver_shim_call<" + found->str(2) + ", " + found->str(1) + ">},\n";
  return all + "};\n" + read(folder + "/launch.h");
}

uint64_t digest(const std::string& text) {
  uint64_t digest = 0xcbf29ce484222325;
  for (unsigned char byte : text) digest = (digest ^ byte) * 0x100000001b3;
  return digest;
}

}  // namespace

extern "C" {

unsigned nvrtcVersion(int* major, int* minor) {
  const std::string told = setting("PSERVER_STANDIN_NVRTC");
  *major = told.empty() ? 12 : std::stoi(told), *minor = 4;
  return SUCCESS;
}

unsigned nvrtcCreateProgram(Program** program, const char* text, const char*, int headers, const char* const*,
                            const char* const*) {
  if (headers) return INVALID_INPUT;
  *program = new Program{text, "", ""};
  return SUCCESS;
}

unsigned nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  bool is_exact = false;
  for (int at = 0; at < count; ++at) is_exact |= !strcmp(options[at], "--fmad=false");
  if (!is_exact) {
    program->log = "products and sums would be fused: --fmad=false is missing";
    return INVALID_OPTION;
  }
  const std::string text = shimmed(program->text);
  char name[32];
  snprintf(name, sizeof name, "%016llx", (unsigned long long)digest(text));
  const std::string base = setting("PSERVER_STANDIN_FOLDER") + "/" + name, library = base + ".so";
  std::ofstream(setting("PSERVER_STANDIN_COMPILED"), std::ios::app) << name << "\n";
  if (access(library.c_str(), R_OK)) {
    const std::string own = base + "." + std::to_string(getpid());
    std::ofstream(own + ".cpp") << text;
    const std::string flags = "-std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -fPIC -shared -w";
    const std::string command = "g++ " + flags + " -o " + own + ".so " + own + ".cpp 2> " + own + ".log && mv " + own +
                                ".so " + library;
    const int failed = system(command.c_str());
    program->log = read(own + ".log");
    unlink((own + ".log").c_str());
    unlink((own + ".cpp").c_str());
    if (failed) return COMPILATION;
  }
  program->image = "PSERVER STAND-IN " + library + '\0';
  return SUCCESS;
}

unsigned nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return SUCCESS;
}

unsigned nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->image.size();
  return SUCCESS;
}

unsigned nvrtcGetCUBIN(Program* program, char* image) {
  memcpy(image, program->image.data(), program->image.size());
  return SUCCESS;
}

unsigned nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return SUCCESS;
}

unsigned nvrtcGetProgramLog(Program* program, char* log) {
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return SUCCESS;
}

}  // extern "C"
