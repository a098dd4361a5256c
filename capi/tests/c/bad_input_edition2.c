/* Every pointer of edition 2 that may not be NULL gives -1 and a text that names it; so do a rate that is no rate
   and a client that was released. */
#define PADDLE_PSERVER_EDITION 2
#include <paddle_pserver.h>

#include "check.h"

static float w[2] = {1.0f, 2.0f};

static paddle_parameter good(void) {
  paddle_parameter made;
  made.name = (char *)"w";
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = w;
  made.content_len = sizeof w;
  return made;
}

static void no_client(paddle_pserver_client *client, const char *words) {
  const char *names[1] = {"w"};
  paddle_parameter one = good();
  REFUSED(paddle_begin_init_params(client, NULL), words);
  REFUSED(paddle_init_param(client, one), words);
  REFUSED(paddle_finish_init_params(client), words);
  REFUSED(paddle_send_grads(client, &one, 1, 0.1), words);
  REFUSED(paddle_set_params(client, &one, 1), words);
  REFUSED(paddle_get_params(client, names, &one, 1), words);
  REFUSED(paddle_save_model(client, "model"), words);
}

static void null_arguments(paddle_pserver_client *client) {
  const char *names[1] = {NULL};
  paddle_parameter one = good();
  REFUSED(paddle_send_grads(client, NULL, 1, 0.1), "grads is NULL");
  REFUSED(paddle_set_params(client, NULL, 1), "params is NULL");
  REFUSED(paddle_get_params(client, NULL, &one, 1), "names is NULL");
  REFUSED(paddle_get_params(client, names, &one, 1), "names[0] is NULL");
  REFUSED(paddle_save_model(client, NULL), "path is NULL");
  one.name = NULL;
  REFUSED(paddle_init_param(client, one), "name is NULL");
  REFUSED(paddle_send_grads(client, &one, 1, 0.1), "grads[0].name is NULL");
  REFUSED(paddle_set_params(client, &one, 1), "params[0].name is NULL");
  one = good();
  one.content = NULL;
  REFUSED(paddle_init_param(client, one), "content is NULL");
  REFUSED(paddle_send_grads(client, &one, 1, 0.1), "content is NULL");
  REFUSED(paddle_set_params(client, &one, 1), "content is NULL");
}

int main(void) {
  paddle_pserver_client *client;
  paddle_parameter one = good();
  double zero = 0.0;
  no_client(NULL, "NULL");
  no_client((paddle_pserver_client *)(void *)w, "client");
  client = paddle_new_pserver_client();
  CHECK(client != NULL);
  REFUSED(paddle_begin_init_params(client, "optimizer: Nonesuch"), "Nonesuch");
  CHECK(paddle_begin_init_params(client, NULL) == 1);
  null_arguments(client);
  CHECK(paddle_init_param(client, good()) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  null_arguments(client);
  REFUSED(paddle_send_grads(client, &one, 1, zero / zero), "learning rate");
  REFUSED(paddle_send_grads(client, &one, 1, -0.1), "learning rate");
  REFUSED(paddle_send_grads(client, &one, 1, 1.0 / zero), "learning rate");
  REFUSED(paddle_send_grads(client, &one, -1, 0.1), "length -1");
  REFUSED(paddle_set_params(client, &one, -1), "length -1");
  paddle_pserver_client_release(client);
  no_client(client, "released");
  paddle_pserver_client_release(client);
  return 0;
}
