/* Calls with lengths of 64 bits: declared, sent, fetched, started, set, listed, optimizer states, and refused. */
#include <paddle_pserver.h>

#include "check.h"

enum { COUNT = 20000, WIDTH = 3 };

static float w[COUNT], gradient[COUNT], fetched[COUNT], velocity[COUNT];
static double d[2] = {1.0, 2.0}, d_gradient[2] = {0.5, 0.25}, d_fetched[2];
static float rows[4 * WIDTH], fetched_rows[5 * WIDTH];
static const uint64_t ids[4] = {7, 2, 7, 99}, wanted[5] = {7, 50, 7, 2, 99};

static paddle_tensor tensor(const char *name, paddle_element_type type, void *content, size_t content_len) {
  paddle_tensor made;
  memset(&made, 0, sizeof made);
  made.name = name;
  made.element_type = type;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static paddle_tensor of_ids(const uint64_t *which, size_t count, float *content) {
  paddle_tensor made = tensor("table", PADDLE_ELEMENT_TYPE_FLOAT32, content, count * WIDTH * sizeof(float));
  made.ids = which;
  made.ids_len = count;
  return made;
}

static paddle_tensor good(void) { return tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, gradient, sizeof gradient); }

/* The plain oracle of momentum 0.5. */
static void update(double rate) {
  int index;
  for (index = 0; index < COUNT; index++) {
    velocity[index] = 0.5f * velocity[index] - (float)rate * gradient[index];
    w[index] += velocity[index];
  }
}

static void initialise(paddle_pserver_client *client) {
  const uint64_t shape[2] = {COUNT / 4, 4}, wrong[1] = {3};
  paddle_tensor one = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w);
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 } sgd { momentum: 0.5 }") == 1);
  REFUSED(paddle_transfer(client, &one, NULL, 1, NULL), "not initialised yet");
  CHECK(paddle_last_error_code() == PADDLE_ERROR_NOT_INITIALISED);
  REFUSED(paddle_init_tensor(NULL, &one, NULL, 0, NULL), "client is NULL");
  REFUSED(paddle_init_tensor(client, NULL, NULL, 0, NULL), "value is NULL");
  REFUSED(paddle_init_tensor(client, &one, NULL, 1, NULL), "shape is NULL");
  REFUSED(paddle_init_tensor(client, &one, shape, 65, NULL), "65 dimensions; expected at most 64");
  REFUSED(paddle_init_tensor(client, &one, shape, (size_t)-1, NULL), "dimensions; expected at most 64");
  REFUSED(paddle_init_tensor(client, &one, wrong, 1, NULL), "\"w\"");
  one.content_len = 6;
  REFUSED(paddle_init_tensor(client, &one, NULL, 0, NULL), "content_len 6; expected a multiple of 4");
  one.content_len = (size_t)-4;
  REFUSED(paddle_init_tensor(client, &one, NULL, 0, NULL), "content_len 9223372036854775807; expected");
  one.content_len = 0;
  REFUSED(paddle_init_tensor(client, &one, NULL, 0, NULL), "content_len 0");
  one.content_len = sizeof w;
  one.name = NULL;
  REFUSED(paddle_init_tensor(client, &one, NULL, 0, NULL), "value.name is NULL");
  one.name = "w";
  one.ids_len = 4;
  REFUSED(paddle_init_tensor(client, &one, NULL, 0, NULL), "\"w\": 4 ids of rows in a call about whole");
  one.ids_len = 0;
  CHECK(paddle_init_tensor(client, &one, shape, 2, NULL) == 0);
  one = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d, sizeof d);
  CHECK(paddle_init_tensor(client, &one, NULL, 0, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 0);
  CHECK(paddle_init_rows(client, "table", PADDLE_ELEMENT_TYPE_FLOAT32,
                         "optimizer: SGD const_lr { learning_rate: 0.5 } "
                         "sparse { height: 100 width: 3 constant { value: 10 } }") == 0);
  CHECK(paddle_init_rows(client, "vast", PADDLE_ELEMENT_TYPE_FLOAT32,
                         "optimizer: SGD const_lr { learning_rate: 0.5 } sparse { width: 256 rows: 33554432 }") == 0);
  CHECK(paddle_finish_init_params(client) == 0);
}

static void listed(paddle_pserver_client *client, uint64_t updates) {
  paddle_listed_parameter *params = NULL;
  size_t len = 0;
  REFUSED(paddle_list_params(NULL, &params, &len), "client is NULL");
  REFUSED(paddle_list_params(client, NULL, &len), "params is NULL");
  REFUSED(paddle_list_params(client, &params, NULL), "len is NULL");
  CHECK(params == NULL && len == 0);
  CHECK(paddle_list_params(client, &params, &len) == 0 && len == 4);
  CHECK(strcmp(params[0].name, "w") == 0 && params[0].element_type == PADDLE_ELEMENT_TYPE_FLOAT32);
  CHECK(params[0].dimensions == 2 && params[0].shape[0] == COUNT / 4 && params[0].shape[1] == 4);
  CHECK(params[0].content_len == sizeof w && params[0].is_sparse == 0 && params[0].version == updates);
  CHECK(strcmp(params[1].name, "d") == 0 && params[1].element_type == PADDLE_ELEMENT_TYPE_FLOAT64);
  CHECK(params[1].dimensions == 1 && params[1].shape[0] == 2 && params[1].version == 0);
  CHECK(strcmp(params[2].name, "table") == 0 && params[2].is_sparse == 1);
  CHECK(params[2].dimensions == 2 && params[2].shape[0] == 100 && params[2].shape[1] == WIDTH);
  CHECK(strcmp(params[3].name, "vast") == 0 && params[3].content_len == UINT64_C(1) << 35);
  paddle_free(params);
  paddle_free(params);
  CHECK(strstr(paddle_last_error(), "not memory that this library gave") != NULL);
}

static void transferred(paddle_pserver_client *client) {
  const double slow = 0.125;
  uint16_t half[COUNT];
  paddle_tensor grads[2], dst[2];
  int index;
  grads[0] = good();
  dst[0] = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched);
  CHECK(paddle_transfer(client, grads, dst, 1, &slow) == 0);
  update(slow);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
  CHECK(paddle_transfer(client, grads, NULL, 1, NULL) == 0);
  update(0.5);
  CHECK(paddle_transfer(client, NULL, dst, 1, NULL) == 0);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
  listed(client, 2);
  dst[0] = tensor("w", PADDLE_ELEMENT_TYPE_BFLOAT16, half, sizeof half);
  dst[1] = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d_fetched, sizeof d_fetched);
  grads[1] = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d_gradient, sizeof d_gradient);
  CHECK(paddle_transfer(client, grads, dst, 2, &slow) == 0);
  update(slow);
  for (index = 0; index < 2; index++) d[index] -= slow * d_gradient[index];
  for (index = 0; index < 2; index++) CHECK(d_fetched[index] <= d[index] && d[index] <= d_fetched[index]);
  for (index = 0; index < COUNT; index++) {
    uint32_t bits = (uint32_t)half[index] << 16;
    float value, distance;
    memcpy(&value, &bits, sizeof value);
    distance = value < w[index] ? w[index] - value : value - w[index];
    CHECK(distance * 256 <= (w[index] < 0 ? -w[index] : w[index]));
  }
}

/* A call after another about the same parameter, one about others, and the rate of each. */
static void started(paddle_pserver_client *client) {
  const double slow = 0.25;
  paddle_tensor grads[2], dst[2], row, back;
  paddle_call *calls[4] = {NULL, NULL, NULL, NULL};
  float next[2 * WIDTH];
  int index, done = 0;
  for (index = 0; index < 4 * WIDTH; index++) rows[index] = (float)(index / WIDTH + 1);
  grads[0] = good();
  dst[0] = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched);
  calls[0] = paddle_transfer_start(client, grads, NULL, 1, &slow);
  CHECK(calls[0] != NULL);
  calls[1] = paddle_transfer_start(client, grads, dst, 1, NULL);
  CHECK(calls[1] != NULL);
  row = of_ids(ids, 4, rows);
  calls[2] = paddle_transfer_start(client, &row, NULL, 1, &slow);
  CHECK(calls[2] != NULL);
  memset(rows, 0, sizeof rows); /* rows that are sent were copied */
  back = of_ids(wanted, 5, fetched_rows);
  calls[3] = paddle_transfer_start(client, NULL, &back, 1, NULL);
  CHECK(calls[3] != NULL);
  REFUSED(paddle_test(calls[3], NULL), "done is NULL");
  while (!done) CHECK(paddle_test(calls[3], &done) == 0);
  for (index = 3; index >= 0; index--) CHECK(paddle_wait(calls[index]) == 0);
  REFUSED(paddle_wait(calls[2]), "waited for already");
  update(slow);
  update(0.5);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
  for (index = 0; index < WIDTH; index++) {
    CHECK(fetched_rows[index] == 9.0f && fetched_rows[2 * WIDTH + index] == 9.0f); /* 10 - 0.25 * (1 + 3) */
    CHECK(fetched_rows[WIDTH + index] == 10.0f);
    CHECK(fetched_rows[3 * WIDTH + index] == 9.5f && fetched_rows[4 * WIDTH + index] == 9.0f);
  }

  /* A push of rows that fetches others, blocking and started; then a trainer without rows. */
  for (index = 0; index < 4 * WIDTH; index++) rows[index] = 2.0f;
  back = of_ids(ids, 2, next);
  row = of_ids(wanted + 2, 2, rows);
  CHECK(paddle_transfer(client, &row, &back, 1, NULL) == 0);
  for (index = 0; index < WIDTH; index++) CHECK(next[index] == 8.0f && next[WIDTH + index] == 8.5f);
  row = of_ids(ids + 3, 1, rows);
  back = of_ids(wanted + 4, 1, next);
  calls[0] = paddle_transfer_start(client, &row, &back, 1, &slow);
  CHECK(calls[0] != NULL);
  CHECK(paddle_wait(calls[0]) == 0);
  CHECK(next[0] == 8.5f && next[WIDTH - 1] == 8.5f);
  row = of_ids(NULL, 0, NULL);
  CHECK(paddle_transfer(client, &row, NULL, 1, NULL) == 0);

  grads[1] = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d_gradient, sizeof d_gradient);
  dst[1] = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d_fetched, sizeof d_fetched);
  REFUSED(paddle_transfer_start(NULL, grads, dst, 2, NULL) == NULL ? -1 : 0, "client is NULL");
  REFUSED(paddle_transfer_start(client, grads, grads, 2, NULL) == NULL ? -1 : 0, "overlap");
  row = of_ids(ids, 4, rows);
  row.ids = ids + 4;
  row.ids_len = 0;
  REFUSED(paddle_transfer_start(client, &row, NULL, 1, NULL) == NULL ? -1 : 0, "48 bytes of values for 0 rows");
}

static void refused(paddle_pserver_client *client) {
  double wrong = -1.0;
  paddle_tensor grad = good(), dst = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched), both[2];
  REFUSED(paddle_transfer(NULL, &grad, &dst, 1, NULL), "client is NULL");
  REFUSED(paddle_transfer(client, NULL, NULL, 1, NULL), "grads and dst are NULL");
  REFUSED(paddle_transfer(client, &grad, &dst, 0, NULL), "grads: length 0; expected at least one");
  REFUSED(paddle_transfer(client, NULL, &dst, 0, NULL), "dst: length 0; expected at least one");
  REFUSED(paddle_transfer(client, &grad, &dst, (size_t)-1, NULL), "no array is that long");
  REFUSED(paddle_transfer(client, &grad, &dst, 1, &wrong), "learning rate -1; expected a finite number");
  wrong = 0.5;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, &wrong), "learning rate 0.5 without grads");
  REFUSED(paddle_transfer(client, &grad, &grad, 1, NULL), "overlap");
  dst.name = NULL;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "dst[0].name is NULL");
  REFUSED(paddle_transfer(client, &grad, &dst, 1, NULL), "dst[0].name is NULL");
  dst.name = "d";
  dst.element_type = PADDLE_ELEMENT_TYPE_FLOAT64;
  REFUSED(paddle_transfer(client, &grad, &dst, 1, NULL), "same parameters");
  dst.element_type = PADDLE_ELEMENT_TYPE_FLOAT16;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "\"d\": its value as float16; expected float64");
  dst.name = "w";
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "a destination of 80000 bytes; expected 40000");
  dst.element_type = PADDLE_ELEMENT_TYPE_INT32;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "\"w\": its value as int32; expected float32");
  dst.element_type = (paddle_element_type)99;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "element type 99");
  dst.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  dst.content_len = (size_t)-4;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "content_len 9223372036854775807");
  dst.content_len = sizeof fetched - 4;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "a destination of 79996 bytes; expected 80000");
  dst.content = NULL;
  REFUSED(paddle_transfer(client, NULL, &dst, 1, NULL), "content is NULL");
  grad.content_len = 8;
  REFUSED(paddle_transfer(client, &grad, NULL, 1, NULL), "8 bytes; expected 80000");
  grad.content = NULL;
  REFUSED(paddle_transfer(client, &grad, NULL, 1, NULL), "content is NULL");
  grad = good();
  grad.element_type = PADDLE_ELEMENT_TYPE_INT32;
  REFUSED(paddle_transfer(client, &grad, NULL, 1, NULL), "element type int32; expected float32");
  grad = good();
  grad.ids = ids;
  grad.ids_len = 4;
  REFUSED(paddle_transfer(client, &grad, NULL, 1, NULL), "\"w\": 4 ids of rows in a call about whole");
  grad.name = "nobody";
  REFUSED(paddle_transfer(client, &grad, NULL, 1, NULL), "nobody");
  both[0] = good();
  both[1] = of_ids(ids, 4, rows);
  REFUSED(paddle_transfer(client, both, NULL, 2, NULL), "\"table\": 4 ids of rows in a call about whole");
  both[1] = good();
  REFUSED(paddle_transfer(client, both, NULL, 2, NULL), "twice");
  both[0] = of_ids(ids, 4, rows);
  REFUSED(paddle_transfer(client, both, NULL, 2, NULL), "\"w\" is not sparse");
  both[1] = of_ids(ids, 4, rows);
  REFUSED(paddle_transfer(client, both, both + 1, 1, NULL), "overlap");
  both[1].ids_len = (size_t)-1;
  REFUSED(paddle_transfer(client, both + 1, NULL, 1, NULL), "no array is that long");
  both[1].ids = NULL;
  REFUSED(paddle_transfer(client, NULL, both + 1, 1, NULL), "ids is NULL");
  CHECK(paddle_last_error_code() == PADDLE_ERROR_REFUSED);
}

static void states(paddle_pserver_client *client) {
  paddle_tensor *found = NULL, one, none[1];
  size_t len = 7;
  uint64_t updates = 0;
  int index;
  REFUSED(paddle_get_state(NULL, "w", &found, &len, &updates), "client is NULL");
  REFUSED(paddle_get_state(client, NULL, &found, &len, &updates), "name is NULL");
  REFUSED(paddle_get_state(client, "w", NULL, &len, &updates), "states is NULL");
  REFUSED(paddle_get_state(client, "w", &found, NULL, &updates), "len is NULL");
  REFUSED(paddle_get_state(client, "w", &found, &len, NULL), "updates is NULL");
  REFUSED(paddle_get_state(client, "nobody", &found, &len, &updates), "nobody");
  CHECK(found == NULL && len == 7 && updates == 0);
  CHECK(paddle_get_state(client, "d", &found, &len, &updates) == 0 && len == 0 && updates == 1);
  CHECK(paddle_set_state(client, "d", NULL, 0, updates) == 0);
  paddle_free(found);
  CHECK(paddle_get_state(client, "w", &found, &len, &updates) == 0 && len == 1 && updates == 5);
  CHECK(found->element_type == PADDLE_ELEMENT_TYPE_FLOAT32 && found->content_len == sizeof velocity);
  CHECK(memcmp(found->content, velocity, sizeof velocity) == 0);

  one = *found;
  REFUSED(paddle_set_state(NULL, "w", &one, 1, updates), "client is NULL");
  REFUSED(paddle_set_state(client, "w", NULL, 1, updates), "states is NULL");
  REFUSED(paddle_set_state(client, "w", &one, 0, updates), "each once");
  one.name = "other";
  REFUSED(paddle_set_state(client, "w", &one, 1, updates), "[\"other\"]; expected [\"");
  one = *found;
  one.content_len -= 4;
  REFUSED(paddle_set_state(client, "w", &one, 1, updates), "79996 bytes of state");
  one.content_len = sizeof velocity;
  one.element_type = PADDLE_ELEMENT_TYPE_FLOAT64;
  REFUSED(paddle_set_state(client, "w", &one, 1, updates), "of float64; expected float32");
  one.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  one.ids_len = 1;
  REFUSED(paddle_set_state(client, "w", &one, 1, updates), "1 ids of rows");
  one.ids_len = 0;
  for (index = 0; index < COUNT; index++) velocity[index] = (float)(index % 7);
  one.content = velocity;
  CHECK(paddle_set_state(client, "w", &one, 1, 40) == 0);
  paddle_free(found);
  CHECK(paddle_get_state(client, "w", &found, &len, &updates) == 0 && len == 1 && updates == 40);
  CHECK(memcmp(found->content, velocity, sizeof velocity) == 0);
  paddle_free(found);

  /* The next update goes on from the state that was set, and from the value that was set. */
  for (index = 0; index < COUNT; index++) w[index] = (float)index;
  one = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w);
  REFUSED(paddle_set_tensors(NULL, &one, 1), "client is NULL");
  REFUSED(paddle_set_tensors(client, NULL, 1), "values is NULL");
  REFUSED(paddle_set_tensors(client, &one, 0), "at least one");
  none[0] = of_ids(ids, 4, rows);
  REFUSED(paddle_set_tensors(client, none, 1), "4 ids of rows in a call about whole");
  none[0] = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT16, w, sizeof w);
  REFUSED(paddle_set_tensors(client, none, 1), "element type float16; expected float32");
  CHECK(paddle_set_tensors(client, &one, 1) == 0);
  one = good();
  none[0] = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched);
  CHECK(paddle_transfer(client, &one, none, 1, NULL) == 0);
  update(0.5);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
}

int main(void) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  int index;
  CHECK(client != NULL);
  for (index = 0; index < COUNT; index++) {
    w[index] = (float)index;
    gradient[index] = (float)(index % 5) - 1.0f;
  }
  initialise(client);
  refused(client);
  listed(client, 0);
  transferred(client);
  started(client);
  states(client);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
