/* Gradients in a buffer of the library, and parameters where the servers wrote them. */
#include <paddle_pserver.h>

#include "check.h"

enum { COUNT = 100000 };

static float weights[COUNT], ordinary[16], fetched[COUNT];

static paddle_parameter parameter(const char *name, void *content, int content_len) {
  paddle_parameter made;
  made.name = (char *)name;
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static paddle_tensor tensor(void *content, size_t content_len) {
  paddle_tensor made;
  memset(&made, 0, sizeof made);
  made.name = "w";
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.content = content;
  made.content_len = content_len;
  return made;
}

/* Compares a parameter of a view with what it should be everywhere. */
static void shows(const paddle_view *view, float expected) {
  size_t bytes, all = 0;
  int piece, count = paddle_view_pieces(view, 0);
  const void *content;
  CHECK(count >= 1);
  for (piece = 0; piece < count; piece++) {
    const float *numbers;
    size_t index;
    CHECK(paddle_view_piece(view, 0, piece, &content, &bytes) == 0);
    numbers = (const float *)content;
    for (index = 0; index < bytes / sizeof(float); index++) CHECK(numbers[index] == expected);
    all += bytes;
  }
  CHECK(all == sizeof weights);
  REFUSED(paddle_view_piece(view, 0, count, &content, &bytes), "expected one of");
  REFUSED(paddle_view_piece(view, 0, -1, &content, &bytes), "piece -1");
  REFUSED(paddle_view_piece(view, 1, 0, &content, &bytes), "parameter 1 of the view; expected one of 1");
  REFUSED(paddle_view_piece(view, 0, 0, NULL, &bytes), "content is NULL");
  REFUSED(paddle_view_piece(view, 0, 0, &content, NULL), "bytes is NULL");
  REFUSED(paddle_view_pieces(view, -1), "parameter -1");
}

static void misused(paddle_pserver_client *client, paddle_pserver_client *other) {
  float *buffer = (float *)paddle_buffer_alloc(client, 100);
  CHECK(buffer != NULL && buffer[0] == 0.0f);
  CHECK(paddle_buffer_path(client, buffer) == 1 && paddle_buffer_path(client, buffer + 24) == 1);
  REFUSED(paddle_buffer_path(other, buffer), "lies in no buffer");
  REFUSED(paddle_buffer_free(other, buffer), "no buffer of this client");
  REFUSED(paddle_buffer_free(client, buffer + 1), "no buffer of this client");
  REFUSED(paddle_buffer_free(client, ordinary), "no buffer of this client");
  REFUSED(paddle_register_buffer(client, buffer + 1, 4), "overlap");
  REFUSED(paddle_unregister_buffer(client, buffer), "expected registered memory");
  CHECK(paddle_buffer_free(client, buffer) == 0 && paddle_buffer_free(client, NULL) == 0);
  REFUSED(paddle_buffer_free(client, buffer), "freed already");
  CHECK(paddle_buffer_alloc(client, 0) == NULL && paddle_buffer_alloc(client, (size_t)-1) == NULL);
  CHECK(paddle_buffer_alloc(NULL, 1) == NULL);

  CHECK(paddle_register_buffer(client, ordinary, sizeof ordinary) == 0);
  CHECK(paddle_buffer_path(client, ordinary) == 0);
  REFUSED(paddle_register_buffer(client, ordinary + 8, 4), "overlap");
  REFUSED(paddle_register_buffer(client, NULL, 4), "memory is NULL");
  REFUSED(paddle_register_buffer(client, weights, 0), "0 bytes");
  REFUSED(paddle_unregister_buffer(client, ordinary + 1), "is not registered");
  CHECK(paddle_unregister_buffer(client, ordinary) == 0);
  REFUSED(paddle_unregister_buffer(client, ordinary), "is not registered");
  REFUSED(paddle_view_release(NULL), "view is NULL");
  REFUSED(paddle_view_pieces((const paddle_view *)client, 0), "never given");
}

int main(int count, char **arguments) {
  char options[200] = "coordinator=";
  paddle_pserver_client *client, *other = paddle_new_pserver_client();
  paddle_gradient grad;
  paddle_parameter dst = parameter(NULL, fetched, sizeof fetched);
  paddle_tensor sent;
  paddle_view *view = NULL, *second = NULL;
  paddle_call *call;
  float *gradient, *place;
  const char *name = "w";
  int index;
  CHECK(count == 2 && other != NULL);
  strncat(options, arguments[1], sizeof options - 20);
  client = paddle_new_pserver_client_with(options);
  CHECK(client != NULL);
  misused(client, other);
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 1 }") == 1);
  CHECK(paddle_init_param(client, parameter("w", weights, sizeof weights), NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);

  gradient = (float *)paddle_buffer_alloc(client, sizeof weights);
  CHECK(gradient != NULL);
  for (index = 0; index < COUNT; index++) gradient[index] = -1.0f;
  grad = parameter("w", gradient, sizeof weights);
  sent = tensor(gradient, sizeof weights);
  REFUSED(paddle_get_params_view(client, (const char **)&name, 1, NULL), "out is NULL");
  REFUSED(paddle_get_params_view(client, (const char **)&name, 0, &view), "at least one");
  CHECK(view == NULL);
  view = paddle_transfer_view(client, &sent, NULL, 1, NULL);
  CHECK(view != NULL);
  shows(view, 1.0f);
  /* Sending goes on while there is a view; fetching the same parameter waits for its release. */
  CHECK(paddle_send_grads(client, &grad, 1) == 0);
  shows(view, 1.0f);
  REFUSED(paddle_transfer_view(client, &sent, NULL, 1, NULL) == NULL ? -1 : 0, "\"w\": a view holds it");
  REFUSED(paddle_get_params_view(client, (const char **)&name, 1, &second), "a view holds it");
  REFUSED(paddle_push_pull(client, &grad, &dst, 1), "a view holds it");
  CHECK(paddle_view_release(view) == 0);
  REFUSED(paddle_view_release(view), "released already");
  REFUSED(paddle_view_pieces(view, 0), "released already");
  CHECK(paddle_get_params_view(client, (const char **)&name, 1, &view) == 0);
  shows(view, 2.0f);
  CHECK(paddle_view_release(view) == 0);

  /* Neither what a call reads from nor what it writes to is freed before it is waited for. */
  place = (float *)paddle_buffer_alloc(client, sizeof weights);
  CHECK(place != NULL);
  dst = parameter(NULL, place, sizeof weights);
  CHECK(paddle_push_pull_start(client, &grad, &dst, 1, &call) == 0);
  REFUSED(paddle_buffer_free(client, place), "used by a call");
  REFUSED(paddle_buffer_free(client, gradient), "used by a call");
  CHECK(paddle_wait(call) == 0);
  memcpy(fetched, place, sizeof weights);
  CHECK(paddle_buffer_free(client, place) == 0);
  CHECK(fetched[0] == 3.0f && fetched[COUNT - 1] == 3.0f);
  CHECK(paddle_buffer_path(client, gradient) == 1);
  CHECK(paddle_buffer_free(client, gradient) == 0);

  /* The trainer's own memory, at both ends. */
  CHECK(paddle_register_buffer(client, weights, sizeof weights) == 0);
  CHECK(paddle_register_buffer(client, fetched, sizeof fetched) == 0);
  for (index = 0; index < COUNT; index++) weights[index] = -1.0f;
  grad = parameter("w", weights, sizeof weights);
  dst = parameter(NULL, fetched, sizeof fetched);
  CHECK(paddle_push_pull_start(client, &grad, &dst, 1, &call) == 0);
  REFUSED(paddle_unregister_buffer(client, weights), "used by a call");
  REFUSED(paddle_unregister_buffer(client, fetched), "used by a call");
  CHECK(paddle_wait(call) == 0);
  for (index = 0; index < COUNT; index++) CHECK(fetched[index] == 4.0f);
  CHECK(paddle_unregister_buffer(client, fetched) == 0);
  CHECK(paddle_send_grads(client, &grad, 1) == 0);
  CHECK(paddle_unregister_buffer(client, weights) == 0);

  /* What is not released goes with the client. */
  CHECK(paddle_register_buffer(client, weights, sizeof weights) == 0);
  CHECK(paddle_buffer_alloc(client, 5000) != NULL);
  CHECK(paddle_get_params_view(client, (const char **)&name, 1, &view) == 0);
  shows(view, 5.0f);
  paddle_pserver_client_release(client);
  REFUSED(paddle_view_pieces(view, 0), "client was released before");
  REFUSED(paddle_view_release(view), "client was released before");
  paddle_pserver_client_release(other);
  return 0;
}
