/* Calls are cancelled by a signal handler and by another thread, and the client goes on. The job has two trainers. */
#define _POSIX_C_SOURCE 200809L
#include <paddle_pserver.h>

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "check.h"

enum { COUNT = 20000, TIMES = 5 };

static paddle_pserver_client *one, *other;
static pthread_t main_thread;
static struct timespec cancelled_at;
static float value[COUNT], gradient[COUNT], fetched[COUNT], others[COUNT];
static double fastest;

static paddle_parameter parameter(void *content) {
  paddle_parameter made;
  made.name = (char *)"w";
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = content;
  made.content_len = sizeof value;
  return made;
}

static void on_interrupt(int number) {
  (void)number;
  clock_gettime(CLOCK_MONOTONIC, &cancelled_at);
  paddle_cancel(one);
}

static void sleep_for(long milliseconds) {
  struct timespec time;
  time.tv_sec = milliseconds / 1000;
  time.tv_nsec = milliseconds % 1000 * 1000000;
  nanosleep(&time, NULL);
}

static void *interrupt(void *nothing) {
  sleep_for(100);
  CHECK(pthread_kill(main_thread, SIGINT) == 0);
  return nothing;
}

static void *cancel(void *nothing) {
  sleep_for(100);
  clock_gettime(CLOCK_MONOTONIC, &cancelled_at);
  CHECK(paddle_cancel(one) == 0);
  return nothing;
}

/* The call has just ended. */
static void measure(const char *what) {
  struct timespec now;
  double milliseconds;
  clock_gettime(CLOCK_MONOTONIC, &now);
  milliseconds = (now.tv_sec - cancelled_at.tv_sec) * 1e3 + (now.tv_nsec - cancelled_at.tv_nsec) * 1e-6;
  printf("%s: %.1f ms\n", what, milliseconds);
  CHECK(milliseconds < 10000); /* The deadline is 60 s. */
  if (fastest == 0 || milliseconds < fastest) fastest = milliseconds;
}

static void *train(void *client) {
  paddle_gradient grad = parameter(gradient);
  paddle_parameter dst = parameter(others);
  CHECK(paddle_push_pull(client, &grad, &dst, 1) == 0);
  return NULL;
}

static void *begin(void *client) {
  CHECK(paddle_begin_init_params(client, NULL) == 0);
  return NULL;
}

int main(void) {
  paddle_gradient grad = parameter(gradient);
  paddle_parameter dst = parameter(fetched);
  struct sigaction action;
  pthread_t thread;
  paddle_call *call;
  int index;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  CHECK(sigaction(SIGINT, &action, NULL) == 0);
  main_thread = pthread_self();
  one = paddle_new_pserver_client_with("trainer=0");
  other = paddle_new_pserver_client_with("trainer=1");
  CHECK(one != NULL && other != NULL);
  CHECK(paddle_cancel(NULL) == -1 && paddle_cancel((paddle_pserver_client *)&grad) == -1);
  CHECK(strcmp(paddle_last_error(), "") == 0);
  for (index = 0; index < COUNT; index++) value[index] = gradient[index] = (float)index;
  CHECK(paddle_begin_init_params(one, "optimizer: SGD const_lr { learning_rate: 0.25 }") == 1);
  CHECK(paddle_init_param(one, parameter(value), NULL) == 0);
  CHECK(pthread_create(&thread, NULL, begin, other) == 0);
  CHECK(paddle_finish_init_params(one) == 0);
  CHECK(pthread_join(thread, NULL) == 0);

  /* The other trainer has sent nothing, so each of these calls would wait until its deadline. */
  for (index = 0; index < TIMES; index++) {
    CHECK(pthread_create(&thread, NULL, interrupt, NULL) == 0);
    REFUSED(paddle_push_pull(one, &grad, &dst, 1), "cancelled");
    measure("a signal");
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, cancel, NULL) == 0);
    REFUSED(paddle_push_pull(one, &grad, &dst, 1), "cancelled");
    measure("a thread");
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(paddle_push_pull_start(one, &grad, &dst, 1, &call) == 0);
    CHECK(pthread_create(&thread, NULL, interrupt, NULL) == 0);
    REFUSED(paddle_wait(call), "cancelled");
    measure("a started call");
    CHECK(pthread_join(thread, NULL) == 0);
  }
  printf("fastest: %.1f ms\n", fastest);

  /* What was cancelled before a call has no effect on it, and no gradient was applied. */
  CHECK(paddle_cancel(one) == 0 && paddle_cancel(other) == 0);
  CHECK(pthread_create(&thread, NULL, train, other) == 0);
  CHECK(paddle_push_pull(one, &grad, &dst, 1) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  for (index = 0; index < COUNT; index++) CHECK(fetched[index] == value[index] - 0.25f * gradient[index]);
  paddle_pserver_client_release(one);
  CHECK(paddle_cancel(one) == -1);
  paddle_pserver_client_release(other);
  return fastest < 500 ? 0 : 1;
}
