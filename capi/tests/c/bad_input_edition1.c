/* Every pointer of edition 1 that may not be NULL gives -1 and a text that names it; so does a client that was
   released. */
#define PADDLE_PSERVER_EDITION 1
#include <paddle_pserver.h>

#include "check.h"

static float w[2] = {1.0f, 2.0f};

static void no_client(paddle_pserver_client *client, const char *words) {
  void *dst = NULL;
  int dst_len = 0;
  REFUSED(paddle_declare_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, sizeof w), words);
  REFUSED(paddle_begin_init_param(client), words);
  REFUSED(paddle_init_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, w), words);
  REFUSED(paddle_finish_init_param(client), words);
  REFUSED(paddle_send_grad(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, w), words);
  REFUSED(paddle_set_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, w), words);
  REFUSED(paddle_get_param(client, "w", &dst, &dst_len), words);
  REFUSED(paddle_save_model(client, "model"), words);
  CHECK(dst == NULL && dst_len == 0);
}

static void null_arguments(paddle_pserver_client *client) {
  void *dst = NULL;
  int dst_len = 0;
  REFUSED(paddle_declare_param(client, NULL, PADDLE_ELEMENT_TYPE_FLOAT32, sizeof w), "name is NULL");
  REFUSED(paddle_init_param(client, NULL, PADDLE_ELEMENT_TYPE_FLOAT32, w), "name is NULL");
  REFUSED(paddle_init_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, NULL), "content is NULL");
  REFUSED(paddle_send_grad(client, NULL, PADDLE_ELEMENT_TYPE_FLOAT32, w), "name is NULL");
  REFUSED(paddle_send_grad(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, NULL), "content is NULL");
  REFUSED(paddle_set_param(client, NULL, PADDLE_ELEMENT_TYPE_FLOAT32, w), "name is NULL");
  REFUSED(paddle_set_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, NULL), "content is NULL");
  REFUSED(paddle_get_param(client, NULL, &dst, &dst_len), "name is NULL");
  REFUSED(paddle_get_param(client, "w", NULL, &dst_len), "NULL");
  REFUSED(paddle_get_param(client, "w", &dst, NULL), "NULL");
  REFUSED(paddle_save_model(client, NULL), "path is NULL");
  CHECK(dst == NULL && dst_len == 0);
}

int main(void) {
  paddle_pserver_client *client;
  no_client(NULL, "NULL");
  no_client((paddle_pserver_client *)(void *)w, "client");
  client = paddle_new_pserver_client();
  CHECK(client != NULL);
  REFUSED(paddle_send_grad(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, w), "paddle_declare_param");
  CHECK(paddle_begin_init_param(client) == 1);
  CHECK(paddle_declare_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, sizeof w) == 0);
  null_arguments(client);
  CHECK(paddle_init_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, w) == 0);
  CHECK(paddle_finish_init_param(client) == 0);
  null_arguments(client);
  REFUSED(paddle_finish_init_param(client), "already");
  REFUSED(paddle_get_param(client, "nobody", (void **)&client, (int *)w), "nobody");
  paddle_pserver_client_release(client);
  no_client(client, "released");
  paddle_pserver_client_release(client);
  return 0;
}
