/* A checkpoint and a load of values in a job that runs, and the codes of errors. The argument is the saved model's path;
   without one the servers take no checkpoints. */
#include <paddle_pserver.h>

#include "check.h"

enum { COUNT = 3 };

static void fetch(paddle_pserver_client *client, float *values) {
  const char *name = "w";
  paddle_parameter dst = {NULL, PADDLE_ELEMENT_TYPE_FLOAT32, NULL, 0};
  dst.content = values;
  dst.content_len = COUNT * (int)sizeof *values;
  CHECK(paddle_get_params(client, &name, &dst, 1) == 0);
}

#define REFUSED_AS(number, call, words)          \
  do {                                           \
    REFUSED(call, words);                        \
    CHECK(paddle_last_error_code() == (number)); \
  } while (0)

int main(int argc, char **argv) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  float first[COUNT] = {1.0f, 2.0f, 3.0f}, ones[COUNT] = {1.0f, 1.0f, 1.0f}, found[COUNT];
  const char *name = "w";
  paddle_parameter all, dst;
  uint64_t version = 77, rounds = 77;
  CHECK(client != NULL && paddle_last_error_code() == 0);
  all.name = (char *)"w";
  all.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  all.content = first;
  all.content_len = sizeof first;
  dst = all;
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  REFUSED_AS(PADDLE_ERROR_NOT_INITIALISED, paddle_get_params(client, &name, &dst, 1), "not initialised");
  CHECK(paddle_init_param(client, all, NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  CHECK(paddle_last_error_code() == PADDLE_ERROR_NOT_INITIALISED);
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_resume_rounds(NULL, &rounds), "client is NULL");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_resume_rounds(client, NULL), "rounds is NULL");
  CHECK(rounds == 77);
  CHECK(paddle_resume_rounds(client, &rounds) == 0 && rounds == 0);
  all.content = ones;
  CHECK(paddle_send_grads(client, &all, 1) == 0);
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_checkpoint(NULL, &version), "client is NULL");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_checkpoint(client, (uint64_t *)((char *)&version + 1)), "a multiple of 8");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_load_model(NULL, "model"), "client is NULL");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_load_model(client, NULL), "path is NULL");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_load_model(client, "no/such/file"), "no/such/file");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_load_model(client, argv[0]), "not a safetensors file");
  if (argc < 2) {
    REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_checkpoint(client, &version), "expected one with checkpoint_dir");
    CHECK(version == 77);
  } else {
    CHECK(paddle_checkpoint(client, &version) == 0 && version == 1);
    CHECK(paddle_checkpoint(client, NULL) == 0);
    CHECK(paddle_save_model(client, "saved.safetensors") == 0);
    CHECK(paddle_send_grads(client, &all, 1) == 0);
    fetch(client, found);
    CHECK(found[0] == 0.0f && found[2] == 2.0f);
    CHECK(paddle_load_model(client, argv[1]) == 0);
    fetch(client, found);
    CHECK(found[0] == 0.5f && found[1] == 1.5f && found[2] == 2.5f);
  }
  CHECK(paddle_trainers(client) == 1 && paddle_servers(client) == (argc < 2 ? 2 : 1));
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_trainers(NULL), "client is NULL");
  REFUSED_AS(PADDLE_ERROR_REFUSED, paddle_servers(NULL), "client is NULL");
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
