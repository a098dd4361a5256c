/* Gradients and parameters on a device, whose memory the processor cannot touch: that of the stand-in driver. */
#include <dlfcn.h>

#include <paddle_pserver.h>

#include "check.h"

enum { COUNT = 100000, BYTES = COUNT * (int)sizeof(float) };

/* What the program takes of the driver. */
static unsigned (*init)(unsigned);
static unsigned (*retain)(void **, int);
static unsigned (*release)(int);
static unsigned (*set_current)(void *);
static unsigned (*allocate)(unsigned long long *, size_t);
static unsigned (*give_back)(unsigned long long);
static unsigned (*to_device)(unsigned long long, const void *, size_t);
static unsigned (*from_device)(void *, unsigned long long, size_t);

/* The contexts of three devices; the program's own is that of the first. */
enum { DEVICES = 3 };
static void *contexts[DEVICES];

static float weights[COUNT], numbers[COUNT], fetched[COUNT];

static void find(void *library, void *function, const char *name) {
  *(void **)function = dlsym(library, name);
  CHECK(*(void **)function != NULL);
}

static void open_device(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  int device;
  CHECK(library != NULL);
  find(library, &init, "cuInit");
  find(library, &retain, "cuDevicePrimaryCtxRetain");
  find(library, &release, "cuDevicePrimaryCtxRelease_v2");
  find(library, &set_current, "cuCtxSetCurrent");
  find(library, &allocate, "cuMemAlloc_v2");
  find(library, &give_back, "cuMemFree_v2");
  find(library, &to_device, "cuMemcpyHtoD_v2");
  find(library, &from_device, "cuMemcpyDtoH_v2");
  CHECK(init(0) == 0);
  for (device = 0; device < DEVICES; device++) CHECK(retain(&contexts[device], device) == 0);
  CHECK(set_current(contexts[0]) == 0);
}

static paddle_parameter parameter(void *content, int content_len) {
  paddle_parameter made;
  made.name = (char *)"w";
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static void fill(unsigned long long device, float number) {
  int index;
  for (index = 0; index < COUNT; index++) numbers[index] = number;
  CHECK(to_device(device, numbers, BYTES) == 0);
}

static void holds(unsigned long long device, float number) {
  int index;
  CHECK(from_device(fetched, device, BYTES) == 0);
  for (index = 0; index < COUNT; index++) CHECK(fetched[index] == number);
}

/* The calls with lengths of 64 bits. The value is 1.5 before and after. */
static void transferred(paddle_pserver_client *client, unsigned long long memory, unsigned long long place) {
  const double slow = 0.25;
  paddle_tensor grad = {"w", PADDLE_ELEMENT_TYPE_FLOAT32, (void *)(uintptr_t)memory, BYTES, NULL, 0};
  paddle_tensor dst = {"w", PADDLE_ELEMENT_TYPE_FLOAT32, (void *)(uintptr_t)place, BYTES, NULL, 0};
  paddle_call *call;
  paddle_view *view;
  const void *content;
  size_t bytes;
  fill(memory, 2.0f);
  CHECK(paddle_transfer(client, &grad, &dst, 1, &slow) == 0);
  holds(place, 1.0f);
  fill(memory, -1.0f);
  call = paddle_transfer_start(client, &grad, &dst, 1, NULL);
  CHECK(call != NULL);
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "used by a call that is in progress");
  CHECK(paddle_wait(call) == 0);
  holds(place, 1.5f);
  fill(memory, 9.0f);
  CHECK(paddle_set_tensors(client, &grad, 1) == 0);
  CHECK(paddle_transfer(client, NULL, &dst, 1, NULL) == 0);
  holds(place, 9.0f);
  fill(memory, 2.0f);
  view = paddle_transfer_view(client, &grad, NULL, 1, &slow);
  CHECK(view != NULL);
  CHECK(paddle_view_piece(view, 0, 0, &content, &bytes) == 0 && *(const float *)content == 8.5f);
  CHECK(paddle_view_release(view) == 0);
  fill(memory, 1.5f);
  CHECK(paddle_set_tensors(client, &grad, 1) == 0);
  fill(memory, 2.0f);
}

/* A trainer with three devices: one gradient of all of them is sent, and the value is written to all. */
static void replicas(paddle_pserver_client *client) {
  unsigned long long gradients[DEVICES], places[DEVICES], other = 0;
  int device;
  uint64_t ids[1] = {0};
  paddle_gradient grad;
  paddle_parameter dst;
  paddle_rows rows;
  paddle_call *call;
  for (device = 0; device < DEVICES; device++) {
    CHECK(set_current(contexts[device]) == 0);
    CHECK(allocate(&gradients[device], BYTES) == 0 && allocate(&places[device], BYTES) == 0);
  }
  CHECK(set_current(contexts[0]) == 0);
#define AT(address) ((void *)(uintptr_t)(address))
  REFUSED(paddle_register_replica(client, AT(gradients[0]), AT(gradients[1]), BYTES), "not the start of registered");
  CHECK(paddle_register_buffer(client, AT(gradients[0]), BYTES) == 0);
  CHECK(paddle_register_buffer(client, AT(places[0]), BYTES) == 0);
  REFUSED(paddle_register_replica(client, AT(gradients[0]), AT(places[0]), BYTES), "memory of this client already");
  REFUSED(paddle_register_replica(client, AT(gradients[0]), numbers, BYTES), "expected memory of a CUDA device");
  REFUSED(paddle_register_replica(client, AT(gradients[0]), AT(gradients[1]), BYTES - 4), "expected 400000");
  for (device = 1; device < DEVICES; device++) {
    CHECK(paddle_register_replica(client, AT(gradients[0]), AT(gradients[device]), BYTES) == 0);
    CHECK(paddle_register_replica(client, AT(places[0]), AT(places[device]), BYTES) == 0);
  }
  for (device = 0; device < DEVICES; device++) fill(gradients[device], (float)(device + 1));
  grad = parameter(AT(gradients[0]), BYTES);
  dst = parameter(AT(places[0]), BYTES);
  /* 0.5 less 0.5 (1 + 2 + 3). */
  CHECK(paddle_push_pull(client, &grad, &dst, 1) == 0);
  for (device = 0; device < DEVICES; device++) holds(places[device], -2.5f);
  fill(gradients[2], -5.0f);
  CHECK(paddle_push_pull_start(client, &grad, &dst, 1, &call) == 0 && paddle_wait(call) == 0);
  for (device = 0; device < DEVICES; device++) holds(places[device], -1.5f);
  for (device = 0; device < DEVICES; device++) holds(gradients[device], device == 2 ? -5.0f : (float)(device + 1));
  rows.name = (char *)"w";
  rows.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  rows.ids = ids;
  rows.ids_len = 1;
  rows.content = AT(gradients[0]);
  rows.content_len = 4;
  REFUSED(paddle_send_rows(client, &rows, 1), "which has replicas");
  /* A replica is no content by itself, and is forgotten with what it is one of. */
  grad = parameter(AT(gradients[1]), BYTES);
  REFUSED(paddle_send_grads(client, &grad, 1), "lies in a replica of memory");
  REFUSED(paddle_register_buffer(client, AT(gradients[1]), BYTES), "memory of this client already");
  REFUSED(paddle_register_replica(client, AT(places[0]), AT(gradients[1]), BYTES), "memory of this client already");
  REFUSED(paddle_unregister_buffer(client, AT(gradients[1])), "is a replica of memory");
  /* A context that the program made current is so still. */
  CHECK(allocate(&other, 8) == 0);
  REFUSED(paddle_register_buffer(client, AT(other), 9), "of which CUDA device 0 has 8");
  CHECK(give_back(other) == 0);
  CHECK(paddle_unregister_buffer(client, AT(gradients[0])) == 0);
  CHECK(paddle_unregister_buffer(client, AT(places[0])) == 0);
  CHECK(paddle_register_buffer(client, AT(gradients[1]), BYTES) == 0);
  CHECK(paddle_unregister_buffer(client, AT(gradients[1])) == 0);
  for (device = 0; device < DEVICES; device++)
    CHECK(give_back(gradients[device]) == 0 && give_back(places[device]) == 0);
}

int main(void) {
  paddle_pserver_client *client = paddle_new_pserver_client(), *other = paddle_new_pserver_client();
  unsigned long long memory = 0, place = 0;
  char *gradient_at, *place_at;
  char *names[1] = {(char *)"w"};
  paddle_gradient grad, half;
  paddle_parameter dst;
  paddle_call *call;
  CHECK(client != NULL && other != NULL);
  /* No driver is loaded: all memory is the host's. */
  CHECK(paddle_register_buffer(client, weights, sizeof weights) == 0);
  open_device();
  CHECK(allocate(&memory, BYTES) == 0 && allocate(&place, BYTES) == 0);
  gradient_at = (char *)(uintptr_t)memory;
  place_at = (char *)(uintptr_t)place;
  CHECK(paddle_register_buffer(client, gradient_at, BYTES) == 0);
  REFUSED(paddle_register_buffer(client, gradient_at + 4, 4), "overlap");
  REFUSED(paddle_register_buffer(client, place_at, BYTES + 1), "of which CUDA device 0 has 400000");
  CHECK(paddle_register_buffer(client, place_at, BYTES) == 0);
  CHECK(paddle_buffer_path(client, place_at + 8) == 0);

  fill(memory, 4.0f);
  grad = parameter(gradient_at, BYTES);
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  CHECK(paddle_init_param(client, grad, NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);

  /* Every way to send, and to fetch. */
  fill(memory, 1.0f);
  CHECK(paddle_send_grads(client, &grad, 1) == 0);
  dst = parameter(place_at, BYTES);
  CHECK(paddle_get_params(client, (const char **)names, &dst, 1) == 0);
  CHECK(dst.content == (void *)place_at && dst.content_len == BYTES);
  holds(place, 3.5f);
  fill(memory, 2.0f);
  CHECK(paddle_push_pull(client, &grad, &dst, 1) == 0);
  CHECK(dst.content == (void *)place_at);
  holds(place, 2.5f);
  CHECK(paddle_push_pull_start(client, &grad, &dst, 1, &call) == 0);
  CHECK(dst.content == (void *)place_at);
  REFUSED(paddle_unregister_buffer(client, gradient_at), "used by a call that is in progress");
  REFUSED(paddle_push_pull(client, &grad, &dst, 1), "used by a call that is in progress");
  CHECK(paddle_wait(call) == 0);
  holds(place, 1.5f);
  transferred(client, memory, place);
  CHECK(paddle_send_grads(client, &grad, 1) == 0);
  dst = parameter(fetched, BYTES);
  CHECK(paddle_get_params(client, (const char **)names, &dst, 1) == 0 && fetched[COUNT - 1] == 0.5f);
  replicas(client);

  /* What does not fit is refused before anything is followed. */
  half = parameter(gradient_at + BYTES / 2, BYTES);
  REFUSED(paddle_send_grads(client, &half, 1), "of which 200000 are registered");
  dst = parameter(gradient_at, BYTES);
  REFUSED(paddle_push_pull(client, &grad, &dst, 1), "used by a call");
  REFUSED(paddle_unregister_buffer(other, gradient_at), "is not registered");
  CHECK(paddle_unregister_buffer(client, gradient_at) == 0 && paddle_unregister_buffer(client, place_at) == 0);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  paddle_pserver_client_release(other);
  CHECK(give_back(memory) == 0 && give_back(place) == 0);
  CHECK(release(0) == 0 && release(1) == 0 && release(2) == 0);
  return 0;
}
