/* Edition 2: a learning rate with the gradients, and paddle_set_params. */
#define PADDLE_PSERVER_EDITION 2
#include <paddle_pserver.h>

#include "check.h"

#include <math.h>

int main(void) {
  float w[2] = {1.0f, -1.0f};
  double v[1] = {8.0};
  float w_gradient[2] = {1.0f, 1.0f};
  double v_gradient[1] = {2.0};
  float w_fetched[2] = {0.0f, 0.0f};
  char w_name[] = "w", v_name[] = "v";
  const char *names[2] = {"w", "v"};
  paddle_parameter params[2], fetched[2];
  paddle_gradient grads[2];
  paddle_pserver_client *client = paddle_new_pserver_client();
  CHECK(client != NULL);

  params[0].name = w_name;
  params[0].element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  params[0].content = w;
  params[0].content_len = (int)sizeof w;
  params[1].name = v_name;
  params[1].element_type = PADDLE_ELEMENT_TYPE_FLOAT64;
  params[1].content = v;
  params[1].content_len = (int)sizeof v;
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.1 }") == 1);
  CHECK(paddle_init_param(client, params[0]) == 0);
  CHECK(paddle_init_param(client, params[1]) == 0);
  CHECK(paddle_finish_init_params(client) == 0);

  grads[0] = params[0];
  grads[0].content = w_gradient;
  grads[1] = params[1];
  grads[1].content = v_gradient;
  REFUSED(paddle_send_grads(client, grads, 2, NAN), "learning rate NaN");
  REFUSED(paddle_send_grads(client, grads, 2, -0.5), "learning rate -0.5");
  REFUSED(paddle_send_grads(client, grads, 2, INFINITY), "learning rate inf");
  CHECK(paddle_send_grads(client, grads, 2, 0.5) == 0);

  /* One place is ours, the other is the library's. */
  memset(fetched, 0, sizeof fetched);
  fetched[0].content = w_fetched;
  fetched[0].content_len = (int)sizeof w_fetched;
  CHECK(paddle_get_params(client, names, fetched, 2) == 0);
  CHECK(fetched[0].content == w_fetched && w_fetched[0] == 0.5f && w_fetched[1] == -1.5f);
  CHECK(fetched[1].element_type == PADDLE_ELEMENT_TYPE_FLOAT64 && fetched[1].content_len == (int)sizeof v);
  CHECK(((double *)fetched[1].content)[0] == 7.0);
  CHECK(fetched[1].name == names[1]);
  CHECK(paddle_parameter_release(&fetched[1]) == 0);
  CHECK(fetched[1].content == NULL);
  REFUSED(paddle_parameter_release(&fetched[0]), "not memory that this library gave");

  CHECK(paddle_set_params(client, params, 2) == 0);
  fetched[0].content_len = (int)sizeof w_fetched;
  CHECK(paddle_get_params(client, names, fetched, 1) == 0);
  CHECK(memcmp(w_fetched, w, sizeof w) == 0);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
