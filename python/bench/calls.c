/* The C contestant of calls.py: a client whose rounds are paddle_push_pull of the same parameters. */
#include <paddle_pserver.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static paddle_pserver_client *client;
static paddle_gradient *gradients;
static paddle_parameter *values;
static int count;

/* Declares `tensors` parameters of `bytes` each, whose gradients and values are there; 0 if successful. */
int calls_begin(const char *options, const char *config, int tensors, int bytes, void **gradients_at, void **values_at) {
  client = paddle_new_pserver_client_with(options);
  count = tensors;
  gradients = calloc(tensors, sizeof *gradients);
  values = calloc(tensors, sizeof *values);
  if (client == NULL || paddle_begin_init_params(client, config) != 1) return -1;
  for (int at = 0; at < tensors; at++) {
    char name[32];
    snprintf(name, sizeof name, "p%d", at);
    gradients[at].name = strdup(name);
    gradients[at].element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
    gradients[at].content = gradients_at[at];
    gradients[at].content_len = bytes;
    values[at].content = values_at[at];
    values[at].content_len = bytes;


    if (paddle_init_param(client, gradients[at], NULL) != 0) return -1;
  }
  return paddle_finish_init_params(client);
}

/* Seconds that so many rounds take; -1 if one fails. */
double calls_run(int rounds) {
  struct timespec from, to;
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (int round = 0; round < rounds; round++)
    if (paddle_push_pull(client, gradients, values, count) != 0) return -1;
  clock_gettime(CLOCK_MONOTONIC, &to);
  return (to.tv_sec - from.tv_sec) + 1e-9 * (to.tv_nsec - from.tv_nsec);
}

void calls_end(void) { paddle_pserver_client_release(client); }
