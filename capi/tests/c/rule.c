/* An update rule of the program's own: as text, by its name, from a file; and a bad one is refused with its place. */
#include <paddle_pserver.h>

#include "check.h"

static paddle_parameter parameter(const char *name, float *content) {
  paddle_parameter made;
  made.name = (char *)name;
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = content;
  made.content_len = 2 * sizeof *content;
  return made;
}

static const char lion[] =
    "rule: 'param b1 in [0, 1) = 0.9; param b2 in [0, 1) = 0.99; param wd = 0; state m = 0\\n'"
    "      'w -= lr*(sign(b1*m+(1-b1)*g) + wd*w); m = b2*m+(1-b2)*g'"
    "rule_set { key: 'b1' value: 0.5 } const_lr { learning_rate: 0.25 }";

int main(int argc, char **argv) {
  float start[2] = {1.0f, 2.0f}, gradient[2] = {0.5f, -3.0f}, away[2] = {-5.0f, 0.0f};
  char from_file[4096];
  const char *names[3] = {"text", "name", "file"};
  paddle_parameter fetched[3];
  paddle_gradient grads[3];
  paddle_pserver_client *client = paddle_new_pserver_client();
  int index;
  CHECK(argc == 2 && client != NULL);
  snprintf(from_file, sizeof from_file, "rule_file: '%s' rule_set { key: 'b1' value: 0.5 } const_lr { learning_rate: 0.25 }",
           argv[1]);

  CHECK(paddle_begin_init_params(client, NULL) == 1);
  REFUSED(paddle_init_param(client, parameter("bad", start), "rule: 'w -= lr*g +'"),
          "rule: line 1, column 12: expected a value, found the end");
  REFUSED(paddle_init_param(client, parameter("bad", start), "rule: 'state m = 0\\nw -= lr*v'"), "line 2, column 9");
  REFUSED(paddle_init_param(client, parameter("bad", start), "rule_file: '/nowhere/at.all'"), "/nowhere/at.all");
  CHECK(paddle_init_param(client, parameter("text", start), lion) == 0);
  CHECK(paddle_init_param(client, parameter("name", start),
                          "algorithm: 'lion' rule_set { key: 'b1' value: 0.5 } const_lr { learning_rate: 0.25 }") == 0);
  CHECK(paddle_init_param(client, parameter("file", start), from_file) == 0);
  CHECK(paddle_finish_init_params(client) == 0);

  /* Each step is of the length of the rate, against the sign of half the momentum and half the gradient. */
  for (index = 0; index < 3; ++index) grads[index] = parameter(names[index], gradient);
  CHECK(paddle_send_grads(client, grads, 3) == 0);
  for (index = 0; index < 3; ++index) grads[index] = parameter(names[index], away);
  CHECK(paddle_send_grads(client, grads, 3) == 0);
  memset(fetched, 0, sizeof fetched);
  CHECK(paddle_get_params(client, names, fetched, 3) == 0);
  for (index = 0; index < 3; ++index) {
    const float *found = (const float *)fetched[index].content;
    CHECK(found[0] == 1.0f && found[1] == 2.5f);
    CHECK(paddle_parameter_release(&fetched[index]) == 0);
  }
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
