/* Everything a caller can get wrong gives -1 (or NULL) and a text, and never ends the program.
   argv[1] is the address of a server that accepts and never answers. */
#include <paddle_pserver.h>

#include "check.h"

static float w[2] = {1.0f, 2.0f};

static paddle_parameter parameter(const char *name, paddle_element_type type, void *content, int content_len) {
  paddle_parameter made;
  made.name = (char *)name;
  made.element_type = type;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static paddle_parameter good(void) { return parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w); }

static void no_client(paddle_pserver_client *client, const char *words) {
  const char *names[1] = {"w"};
  paddle_parameter one = good();
  uint64_t shape[1] = {2}, *ids = NULL;
  paddle_tensor tensor = {"w", PADDLE_ELEMENT_TYPE_FLOAT32, NULL, 0, NULL, 0};
  paddle_state state = {NULL, 0, 0, NULL, 0};
  paddle_listed_parameter *listed = NULL;
  size_t len = 0;
  REFUSED(paddle_begin_init_params(client, NULL), words);
  REFUSED(paddle_begin_init_params_n(client, NULL, 0), words);
  REFUSED(paddle_init_param(client, one, NULL), words);
  REFUSED(paddle_init_param_n(client, one, NULL, 0), words);
  REFUSED(paddle_init_param_shaped(client, one, shape, 1, NULL), words);
  REFUSED(paddle_finish_init_params(client), words);
  REFUSED(paddle_send_grads(client, &one, 1), words);
  REFUSED(paddle_get_params(client, names, &one, 1), words);
  REFUSED(paddle_push_pull(client, &one, &one, 1), words);
  REFUSED(paddle_init_tensor(client, &tensor, shape, 1, NULL), words);
  REFUSED(paddle_transfer(client, &tensor, NULL, 1, NULL), words);
  REFUSED(paddle_transfer_start(client, &tensor, NULL, 1, NULL) == NULL ? -1 : 0, words);
  REFUSED(paddle_set_tensors(client, &tensor, 1), words);
  REFUSED(paddle_list_params(client, &listed, &len), words);
  REFUSED(paddle_list_rows(client, "w", &ids, &len), words);
  REFUSED(paddle_get_state(client, "w", NULL, 0) == NULL ? -1 : 0, words);
  REFUSED(paddle_set_state(client, "w", &state, 1), words);
  REFUSED(paddle_save_model(client, "model"), words);
  REFUSED(paddle_leave(client), words);
  REFUSED(paddle_trainer_id(client), words);
}

static void wrong_names(paddle_pserver_client *client) {
  static char name[10 * 1024 + 1];
  paddle_parameter one = good();
  memset(name, 'n', sizeof name - 1);
  one.name = NULL;
  REFUSED(paddle_init_param(client, one, NULL), "params.name is NULL");
  one.name = (char *)"";
  REFUSED(paddle_init_param(client, one, NULL), "empty");
  one.name = name;
  REFUSED(paddle_init_param(client, one, NULL), "at most 1024 bytes");
  one.name = (char *)"\xff\xfe";
  REFUSED(paddle_init_param(client, one, NULL), "not UTF-8");
}

static void wrong_parameters(paddle_pserver_client *client) {
  uint64_t shape[1] = {3};
  REFUSED(paddle_init_param(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, NULL, 8), NULL), "content is NULL");
  REFUSED(paddle_init_param(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, 0), NULL), "content_len 0");
  REFUSED(paddle_init_param(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, -8), NULL), "content_len -8");
  REFUSED(paddle_init_param(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, 7), NULL), "multiple of 4");
  REFUSED(paddle_init_param(client, parameter("w", (paddle_element_type)99, w, 8), NULL), "element type 99");
  REFUSED(paddle_init_param(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT16, w, 8), NULL), "float16");
  REFUSED(paddle_init_param(client, good(), "optimizer: Nonesuch"), "Nonesuch");
  REFUSED(paddle_init_param(client, good(), "const_lr { learning_rate: nan }"), "learning_rate");
  REFUSED(paddle_init_param(client, good(), "base64:!!"), "base64");
  REFUSED(paddle_init_param_n(client, good(), NULL, 5), "configuration is NULL");
  REFUSED(paddle_init_param_n(client, good(), w, (size_t)-1), "expected 0 to 65536");
  REFUSED(paddle_init_param_shaped(client, good(), NULL, 1, NULL), "shape is NULL");
  REFUSED(paddle_init_param_shaped(client, good(), shape, -1, NULL), "length -1");
  REFUSED(paddle_init_param_shaped(client, good(), shape, 65, NULL), "at most 64");
  REFUSED(paddle_init_param_shaped(client, good(), shape, 1, NULL), "\"w\"");
}

static void wrong_arrays(paddle_pserver_client *client) {
  const char *names[2] = {"w", "w"};
  float short_place[1];
  float places[4] = {5.0f, 5.0f, 5.0f, 5.0f};
  float five = 5.0f;
  paddle_parameter dst[2];
  paddle_gradient grad = good();
  REFUSED(paddle_send_grads(client, NULL, 1), "grads is NULL");
  REFUSED(paddle_send_grads(client, &grad, 0), "at least one");
  REFUSED(paddle_send_grads(client, &grad, -1), "length -1");
  grad.name = (char *)"nobody";
  REFUSED(paddle_send_grads(client, &grad, 1), "nobody");
  grad = parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, 4);
  REFUSED(paddle_send_grads(client, &grad, 1), "4 bytes; expected 8");
  grad = parameter("w", PADDLE_ELEMENT_TYPE_INT32, w, 8);
  REFUSED(paddle_send_grads(client, &grad, 1), "expected float32");
  REFUSED(paddle_get_params(client, NULL, dst, 1), "names is NULL");
  REFUSED(paddle_get_params(client, names, NULL, 1), "dst is NULL");
  REFUSED(paddle_get_params(client, names, dst, -1), "length -1");
  CHECK(paddle_get_params(client, NULL, NULL, 0) == 0);
  dst[0] = parameter(NULL, PADDLE_ELEMENT_TYPE_FLOAT32, short_place, sizeof short_place);
  REFUSED(paddle_get_params(client, names, dst, 1), "room for 4 bytes (content_len); expected room for its 8 bytes");
  dst[0].content_len = -1;
  REFUSED(paddle_get_params(client, names, dst, 1), "content_len -1");
  dst[0] = dst[1] = parameter(NULL, PADDLE_ELEMENT_TYPE_FLOAT32, places, sizeof places);
  REFUSED(paddle_get_params(client, names, dst, 2), "overlap");
  CHECK(dst[0].name == NULL && dst[0].content_len == (int)sizeof places);
  CHECK(memcmp(&places[0], &five, sizeof five) == 0 && memcmp(&places[3], &five, sizeof five) == 0);
  grad = good();
  dst[0] = good();
  REFUSED(paddle_push_pull(client, &grad, dst, 1), "overlap");
  REFUSED(paddle_push_pull(client, NULL, dst, 1), "grads is NULL");
  REFUSED(paddle_push_pull(client, &grad, NULL, 1), "dst is NULL");
  names[0] = "nobody";
  REFUSED(paddle_get_params(client, names, dst, 1), "nobody");
  REFUSED(paddle_save_model(client, NULL), "path is NULL");
  REFUSED(paddle_save_model(client, ""), "path");
  REFUSED(paddle_save_model(client, "../outside"), "..");
}

static void wrong_memory(void) {
  REFUSED(paddle_parameter_release(NULL), "param is NULL");
  paddle_free(NULL);
  paddle_free(w);
  CHECK(strstr(paddle_last_error(), "not memory that this library gave") != NULL);
}

static void silent_server(const char *address) {
  char options[256];
  paddle_pserver_client *client;
  snprintf(options, sizeof options, "coordinator=%s deadline=300ms", address);
  client = paddle_new_pserver_client_with(options);
  CHECK(client != NULL);
  REFUSED(paddle_trainer_id(client), "no answer within 0.3 s from");
  CHECK(paddle_last_error_code() == PADDLE_ERROR_TIMEOUT);
  REFUSED(paddle_begin_init_params(client, NULL), "server 0");
  paddle_pserver_client_release(client);
}

int main(int argc, char **argv) {
  paddle_pserver_client *client;
  paddle_gradient grad = good();
  CHECK(argc == 2);
  CHECK(strcmp(paddle_last_error(), "") == 0);
  CHECK(strcmp(paddle_strerror(0), "success") == 0 && strlen(paddle_strerror(-77)) > 0);
  CHECK(paddle_version()[0] != '\0');
  CHECK(paddle_new_pserver_client_with("colour=red") == NULL);
  CHECK(strstr(paddle_last_error(), "colour=red") != NULL);
  CHECK(paddle_new_pserver_client_with("coordinator=127.0.0.1") == NULL);
  CHECK(strstr(paddle_last_error(), "no port") != NULL);

  no_client(NULL, "client is NULL");
  no_client((paddle_pserver_client *)(uintptr_t)0x1234, "never given");
  paddle_pserver_client_release(NULL);
  paddle_pserver_client_release((paddle_pserver_client *)(uintptr_t)0x1234);

  client = paddle_new_pserver_client();
  CHECK(client != NULL);
  REFUSED(paddle_init_param(client, good(), NULL), "expected begin_init_params first");
  REFUSED(paddle_begin_init_params(client, "optimizer: Nonesuch"), "Nonesuch");
  CHECK(paddle_begin_init_params(client, NULL) == 1);
  REFUSED(paddle_send_grads(client, &grad, 1), "not initialised yet");
  wrong_names(client);
  wrong_parameters(client);
  CHECK(paddle_init_param(client, good(), NULL) == 0);
  REFUSED(paddle_init_param(client, good(), NULL), "declared already");
  CHECK(paddle_finish_init_params(client) == 0);
  REFUSED(paddle_finish_init_params(client), "initialised already");
  wrong_arrays(client);
  wrong_memory();
  CHECK(paddle_send_grads(client, &grad, 1) == 0);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  no_client(client, "released already");
  paddle_pserver_client_release(client);
  silent_server(argv[1]);
  return 0;
}
