/* Many threads share one client; each has an error text of its own. */
#include <paddle_pserver.h>

#include "check.h"

#include <pthread.h>

enum { THREADS = 8, STEPS = 20 };

static paddle_pserver_client *client;

static paddle_parameter parameter(char *name, void *content, int content_len) {
  paddle_parameter made;
  made.name = name;
  made.element_type = PADDLE_ELEMENT_TYPE_INT64;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static void *work(void *argument) {
  int step;
  char name[16];
  char wrong[32];
  snprintf(name, sizeof name, "p%d", *(int *)argument);
  snprintf(wrong, sizeof wrong, "nobody%d", *(int *)argument);
  for (step = 1; step <= STEPS; step++) {
    int64_t one = 1, fetched = 0;
    paddle_gradient grad = parameter(name, &one, sizeof one);
    paddle_parameter dst = parameter(NULL, &fetched, sizeof fetched);
    CHECK(paddle_push_pull(client, &grad, &dst, 1) == 0);
    CHECK(fetched == step);
    grad.name = wrong;
    REFUSED(paddle_send_grads(client, &grad, 1), wrong);
  }
  return NULL;
}

static void *release(void *argument) {
  paddle_pserver_client_release((paddle_pserver_client *)argument);
  return NULL;
}

int main(void) {
  pthread_t threads[THREADS];
  int numbers[THREADS];
  int index;
  client = paddle_new_pserver_client();
  CHECK(client != NULL);
  CHECK(paddle_begin_init_params(client, NULL) == 1);
  for (index = 0; index < THREADS; index++) {
    char name[16];
    int64_t zero = 0;
    numbers[index] = index;
    snprintf(name, sizeof name, "p%d", index);
    CHECK(paddle_init_param(client, parameter(name, &zero, sizeof zero), NULL) == 0);
  }
  CHECK(paddle_finish_init_params(client) == 0);
  for (index = 0; index < THREADS; index++) CHECK(pthread_create(&threads[index], NULL, work, &numbers[index]) == 0);
  for (index = 0; index < THREADS; index++) CHECK(pthread_join(threads[index], NULL) == 0);
  CHECK(strcmp(paddle_last_error(), "") == 0);
  CHECK(paddle_leave(client) == 0);
  /* Only one release finds a client. */
  for (index = 0; index < THREADS; index++) CHECK(pthread_create(&threads[index], NULL, release, client) == 0);
  for (index = 0; index < THREADS; index++) CHECK(pthread_join(threads[index], NULL) == 0);
  REFUSED(paddle_trainer_id(client), "released already");
  return 0;
}
