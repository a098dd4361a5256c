/* Calls are started, overlap with what the program computes, and are waited for. */
#include <paddle_pserver.h>

#include "check.h"

enum { COUNT = 20000 };

static paddle_parameter parameter(const char *name, void *content, int content_len) {
  paddle_parameter made;
  made.name = (char *)name;
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static float big[COUNT], big_gradient[COUNT], big_fetched[COUNT];
static float small[2] = {1.0f, 2.0f}, small_gradient[2] = {0.5f, 0.25f}, small_fetched[2];

static void refused(paddle_pserver_client *client) {
  paddle_gradient grad = parameter("small", small_gradient, sizeof small_gradient);
  paddle_parameter dst = parameter(NULL, small_fetched, sizeof small_fetched);
  paddle_call *call = NULL;
  int done = 7;
  REFUSED(paddle_push_pull_start(NULL, &grad, &dst, 1, &call), "client is NULL");
  REFUSED(paddle_push_pull_start(client, NULL, &dst, 1, &call), "grads is NULL");
  REFUSED(paddle_push_pull_start(client, &grad, NULL, 1, &call), "dst is NULL");
  REFUSED(paddle_push_pull_start(client, &grad, &dst, 0, &call), "at least one");
  REFUSED(paddle_push_pull_start(client, &grad, &dst, 1, NULL), "out is NULL");
  REFUSED(paddle_push_pull_start(client, &grad, &grad, 1, &call), "overlap");
  dst.content = NULL;
  REFUSED(paddle_push_pull_start(client, &grad, &dst, 1, &call), "content is NULL");
  grad.name = (char *)"nobody";
  REFUSED(paddle_push_pull_start(client, &grad, &dst, 1, &call), "nobody");
  CHECK(call == NULL && dst.name == NULL);
  REFUSED(paddle_wait(NULL), "call is NULL");
  REFUSED(paddle_test(NULL, &done), "call is NULL");
  REFUSED(paddle_wait((paddle_call *)(uintptr_t)0x1234), "never given");
  REFUSED(paddle_wait((paddle_call *)client), "never given");
  CHECK(done == 7);
}

int main(void) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  paddle_gradient grads[2];
  paddle_parameter dst[2];
  paddle_call *calls[2];
  double sum = 0;
  int index, done = 0;
  CHECK(client != NULL);
  for (index = 0; index < COUNT; index++) {
    big[index] = (float)index;
    big_gradient[index] = 2.0f;
  }
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  CHECK(paddle_init_param(client, parameter("small", small, sizeof small), NULL) == 0);
  CHECK(paddle_init_param(client, parameter("big", big, sizeof big), NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  refused(client);

  grads[0] = parameter("big", big_gradient, sizeof big_gradient);
  grads[1] = parameter("small", small_gradient, sizeof small_gradient);
  dst[0] = parameter(NULL, big_fetched, sizeof big_fetched);
  dst[1] = parameter(NULL, small_fetched, sizeof small_fetched);
  for (index = 0; index < 2; index++) {
    CHECK(paddle_push_pull_start(client, &grads[index], &dst[index], 1, &calls[index]) == 0);
    CHECK(dst[index].name == grads[index].name && dst[index].content_len == grads[index].content_len);
  }
  for (index = 0; index < COUNT; index++) sum += big[index] * 0.5;
  CHECK(sum == 0.25 * COUNT * (COUNT - 1.0));
  REFUSED(paddle_test(calls[0], NULL), "done is NULL");
  while (!done) CHECK(paddle_test(calls[0], &done) == 0);
  CHECK(paddle_wait(calls[1]) == 0);
  CHECK(paddle_wait(calls[0]) == 0);
  CHECK(small_fetched[0] == 0.75f && small_fetched[1] == 1.875f);
  for (index = 0; index < COUNT; index++) CHECK(big_fetched[index] == (float)index - 1.0f);
  REFUSED(paddle_wait(calls[0]), "waited for already");
  REFUSED(paddle_test(calls[1], &done), "waited for already");

  /* A release gives the memory of calls back that nobody waits for. */
  CHECK(paddle_push_pull_start(client, grads, dst, 2, &calls[0]) == 0);
  CHECK(paddle_push_pull_start(client, grads, dst, 1, &calls[1]) == 0);
  paddle_pserver_client_release(client);
  REFUSED(paddle_test(calls[1], &done), "client was released");
  REFUSED(paddle_wait(calls[0]), "client was released");
  REFUSED(paddle_wait(calls[0]), "waited for already");
  return 0;
}
