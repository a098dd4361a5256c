// How the stand-in driver finds kernels that were compiled for the host: a library exports `pserver_kernels`, a list
// that ends with a kernel without a name.

#ifndef PSERVER_STANDIN_KERNELS_H
#define PSERVER_STANDIN_KERNELS_H

#include <stdint.h>

typedef struct {
  unsigned blocks[3];
  unsigned threads[3];
  unsigned shared;
} PserverLaunch;

typedef struct {
  const char* name;
  // The structure that it takes by value, as its only parameter.
  uint64_t argument_bytes;
  void (*run)(const PserverLaunch* launch, const void* argument);
} PserverKernel;

#ifdef __cplusplus
extern "C"
#endif
const PserverKernel* pserver_kernels(void);

#endif
