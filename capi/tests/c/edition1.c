/* Edition 1: one parameter per call, lengths declared. The servers run SGD with rate 0.1. */
#define PADDLE_PSERVER_EDITION 1
#include <paddle_pserver.h>

#include "check.h"

int main(void) {
  float value[3] = {1.0f, 2.0f, 3.0f};
  float gradient[3] = {10.0f, 20.0f, 30.0f};
  void *fetched = NULL;
  int length = -7;
  paddle_pserver_client *client = paddle_new_pserver_client();
  CHECK(client != NULL);
  CHECK(strcmp(paddle_last_error(), "") == 0);

  CHECK(paddle_begin_init_param(client) == 1);
  REFUSED(paddle_init_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, value), "paddle_declare_param");
  CHECK(paddle_declare_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, (int)sizeof value) == 0);
  REFUSED(paddle_init_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT64, value), "expected float32");
  CHECK(paddle_init_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, value) == 0);
  CHECK(paddle_finish_init_param(client) == 0);

  CHECK(paddle_send_grad(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, gradient) == 0);
  CHECK(paddle_get_param(client, "w", &fetched, &length) == 0);
  CHECK(length == (int)sizeof value);
  CHECK(((float *)fetched)[0] == 0.0f && ((float *)fetched)[1] == 0.0f && ((float *)fetched)[2] == 0.0f);
  paddle_free(fetched);

  CHECK(paddle_set_param(client, "w", PADDLE_ELEMENT_TYPE_FLOAT32, gradient) == 0);
  CHECK(paddle_get_param(client, "w", &fetched, &length) == 0);
  CHECK(memcmp(fetched, gradient, sizeof gradient) == 0);
  paddle_free(fetched);
  CHECK(paddle_save_model(client, "edition1") == 0);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
