/* Edition 3: a configuration per parameter. This source is C and C++ alike. */
#include <paddle_pserver.h>

#include "check.h"

static paddle_parameter parameter(const char *name, paddle_element_type type, void *content, int content_len) {
  paddle_parameter made;
  made.name = (char *)name;
  made.element_type = type;
  made.content = content;
  made.content_len = content_len;
  return made;
}

int main(void) {
  float w[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  float w_gradient[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  unsigned short half[4] = {0x3c00, 0x3c00, 0x3c00, 0x3c00}; /* 1.0 in float16 */
  int64_t count[1] = {40};
  int64_t more[1] = {2};
  float w_fetched[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint64_t shape[2] = {2, 2};
  const char *names[2] = {"w", "count"};
  paddle_gradient grads[2];
  paddle_parameter fetched[2];
  /* optimizer: SGD, const_lr { learning_rate: 0.5 } */
  const unsigned char config[] = {0x08, 0x01, 0x62, 0x09, 0x09, 0, 0, 0, 0, 0, 0, 0xe0, 0x3f};
  paddle_pserver_client *client = paddle_new_pserver_client();
  CHECK(client != NULL);
  CHECK(paddle_trainer_id(client) == 0);

  CHECK(paddle_begin_init_params(client, NULL) == 1);
  CHECK(paddle_init_param_shaped(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w), shape, 2,
                                 "optimizer: SGD const_lr { learning_rate: 0.5 }") == 0);
  CHECK(paddle_init_param_n(client, parameter("w2", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w), config,
                            sizeof config) == 0);
  CHECK(paddle_init_param(client, parameter("w3", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w),
                          "base64:CAFiCQkAAAAAAADgPw==") == 0);
  CHECK(paddle_init_param(client, parameter("count", PADDLE_ELEMENT_TYPE_INT64, count, sizeof count), NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);

  grads[0] = parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w_gradient, sizeof w_gradient);
  grads[1] = parameter("count", PADDLE_ELEMENT_TYPE_INT64, more, sizeof more);
  CHECK(paddle_send_grads(client, grads, 2) == 0);
  memset(fetched, 0, sizeof fetched);
  fetched[0].content = w_fetched;
  fetched[0].content_len = sizeof w_fetched;
  CHECK(paddle_get_params(client, names, fetched, 2) == 0);
  CHECK(w_fetched[0] == 0.5f && w_fetched[3] == 3.5f);
  CHECK(*(int64_t *)fetched[1].content == 42);
  CHECK(paddle_parameter_release(&fetched[1]) == 0);

  /* All three forms of one configuration do the same; halves will do for gradients. */
  names[0] = "w3";
  grads[0] = parameter("w2", PADDLE_ELEMENT_TYPE_FLOAT16, half, sizeof half);
  grads[1] = parameter("w3", PADDLE_ELEMENT_TYPE_FLOAT32, w_gradient, sizeof w_gradient);
  memset(fetched, 0, sizeof fetched);
  CHECK(paddle_push_pull(client, grads, fetched, 2) == 0);
  CHECK(memcmp(fetched[0].content, w_fetched, sizeof w_fetched) == 0);
  CHECK(memcmp(fetched[1].content, w_fetched, sizeof w_fetched) == 0);
  CHECK(fetched[0].name == grads[0].name && fetched[0].element_type == PADDLE_ELEMENT_TYPE_FLOAT32);
  CHECK(paddle_parameter_release(&fetched[0]) == 0);
  CHECK(paddle_parameter_release(&fetched[1]) == 0);

  CHECK(paddle_save_model(client, "edition3") == 0);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
