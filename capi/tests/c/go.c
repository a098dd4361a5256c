/* Edition go: the calls of Paddle's test_cclient.c, with its optimizer.pb in a buffer of 120 bytes, all of which it
   passes as the length. argv[1] is "host:port". */
#include <libpaddle_pserver_cclient.h>

#include "check.h"

/* SGD, const_lr { learning_rate: 0.1 }, clip_norm 0.1: 50 bytes. */
static const unsigned char OPTIMIZER[50] = {
    0x08, 0x01, 0x1a, 0x17, 0xa9, 0x01, 0, 0,    0,    0,    0,    0,    0,    0,    0xb9, 0x01, 0,
    0,    0,    0,    0,    0,    0,    0, 0xc0, 0x01, 0x00, 0x58, 0x00, 0x62, 0x09, 0x09, 0x9a, 0x99,
    0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f, 0xa9, 0x06, 0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f};

int main(int argc, char **argv) {
  static float a[500], b[750], a_gradient[500], b_gradient[750];
  unsigned char config[120] = {0};
  char name_a[] = "param_a", name_b[] = "param_b";
  paddle_parameter first = {name_a, PADDLE_ELEMENT_TYPE_FLOAT32, (unsigned char *)a, sizeof a};
  paddle_parameter second = {name_b, PADDLE_ELEMENT_TYPE_FLOAT32, (unsigned char *)b, sizeof b};
  paddle_gradient first_gradient = {name_a, PADDLE_ELEMENT_TYPE_FLOAT32, (unsigned char *)a_gradient, sizeof a};
  paddle_gradient second_gradient = {name_b, PADDLE_ELEMENT_TYPE_FLOAT32, (unsigned char *)b_gradient, sizeof b};
  paddle_parameter *params[2];
  paddle_gradient *grads[2];
  paddle_pserver_client client, other;
  float before;
  int step;
  CHECK(argc == 2);
  memcpy(config, OPTIMIZER, sizeof OPTIMIZER);
  params[0] = &first;
  params[1] = &second;
  grads[0] = &first_gradient;
  grads[1] = &second_gradient;
  a_gradient[0] = 0.01f;

  client = paddle_new_pserver_client(argv[1], 1);
  CHECK(client == 0);
  other = paddle_new_pserver_client(argv[1], 0);
  CHECK(other == 1);
  CHECK(paddle_begin_init_params(other) == 0);
  CHECK(paddle_begin_init_params(client) == 1);
  CHECK(paddle_init_param(client, first, config, sizeof config) == PSERVER_OK);
  CHECK(paddle_init_param(client, second, config, sizeof config) == PSERVER_OK);
  CHECK(paddle_finish_init_params(client) == PSERVER_OK);
  REFUSED(paddle_finish_init_params(client), "already");

  before = a[0];
  for (step = 0; step < 100; step++) {
    CHECK(paddle_send_grads(client, grads, 2) == PSERVER_OK);
    CHECK(paddle_get_params(client, params, 2) == PSERVER_OK);
    CHECK(a[0] < before);
    before = a[0];
  }
  CHECK(a[0] < -0.09f && a[0] > -0.11f && a[1] == 0.0f);
  CHECK(paddle_save_model(client, (char *)"go") == PSERVER_OK);

  first.content_len = 8;
  REFUSED(paddle_get_params(client, params, 2), "expected room for its 2000 bytes");
  first.content_len = sizeof a + 4;
  REFUSED(paddle_get_params(client, params, 2), "expected exactly its length, 2000 bytes");
  first.content = NULL;
  REFUSED(paddle_get_params(client, params, 2), "content is NULL");
  params[0] = NULL;
  REFUSED(paddle_get_params(client, params, 2), "dst[0] is NULL");
  REFUSED(paddle_send_grads(client, grads, 0), "at least one");
  grads[1] = NULL;
  REFUSED(paddle_send_grads(client, grads, 2), "grads[1] is NULL");
  REFUSED(paddle_send_grads(client, NULL, 1), "grads is NULL");
  REFUSED(paddle_get_params(client, NULL, 1), "dst is NULL");
  REFUSED(paddle_save_model(client, NULL), "path is NULL");
  REFUSED(paddle_init_param(client, second, NULL, 5), "configuration is NULL");
  REFUSED(paddle_new_etcd_pserver_client(NULL), "NULL");
  REFUSED(paddle_new_pserver_client(NULL, 1), "addrs is NULL");
  REFUSED(paddle_new_pserver_client((char *)"", 1), "expected host:port");
  REFUSED(paddle_new_pserver_client((char *)"nonsense", 1), "coordinator");
  REFUSED(paddle_new_etcd_pserver_client((char *)"http://127.0.0.1:2379"), "etcd");
  REFUSED(paddle_begin_init_params(7), "never given");
  REFUSED(paddle_begin_init_params(-1), "never given");
  paddle_pserver_client_release(other);
  paddle_pserver_client_release(client);
  paddle_pserver_client_release(client);
  REFUSED(paddle_begin_init_params(client), "released already");
  first.content = (unsigned char *)a;
  first.content_len = sizeof a;
  grads[1] = grads[0];
  params[0] = params[1];
  REFUSED(paddle_init_param(client, first, config, sizeof config), "released already");
  REFUSED(paddle_finish_init_params(client), "released already");
  REFUSED(paddle_send_grads(client, grads, 1), "released already");
  REFUSED(paddle_get_params(client, params, 1), "released already");
  REFUSED(paddle_save_model(client, (char *)"go"), "released already");
  return 0;
}
