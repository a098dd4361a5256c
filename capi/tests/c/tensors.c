/* Calls with lengths of 64 bits: declared, sent, fetched, viewed, started, set, listed, optimizer states, refused. */
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
  const char *decayed = "optimizer: SGD const_lr { learning_rate: 0.5 } sgd { momentum: 0.5 } l2: 0.125 "
                        "sparse { height: 100 width: 3 constant { value: 1 } }";
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
  CHECK(paddle_init_rows(client, "moved", PADDLE_ELEMENT_TYPE_FLOAT32, decayed) == 0);
  CHECK(paddle_init_rows(client, "heir", PADDLE_ELEMENT_TYPE_FLOAT32, decayed) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
}

static void listed(paddle_pserver_client *client, uint64_t updates) {
  paddle_listed_parameter *params = NULL;
  size_t len = 0;
  REFUSED(paddle_list_params(NULL, &params, &len), "client is NULL");
  REFUSED(paddle_list_params(client, NULL, &len), "params is NULL");
  REFUSED(paddle_list_params(client, &params, NULL), "len is NULL");
  CHECK(params == NULL && len == 0);
  CHECK(paddle_list_params(client, &params, &len) == 0 && len == 6);
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

/* Whether each is as near to w as bfloat16 has it. */
static int is_half_of_w(const uint16_t *half) {
  int index;
  for (index = 0; index < COUNT; index++) {
    uint32_t bits = (uint32_t)half[index] << 16;
    float value, distance;
    memcpy(&value, &bits, sizeof value);
    distance = value < w[index] ? w[index] - value : value - w[index];
    if (distance * 256 > (w[index] < 0 ? -w[index] : w[index])) return 0;
  }
  return 1;
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
  CHECK(is_half_of_w(half));
}

static int view_status(paddle_pserver_client *client, const paddle_tensor *grads, const paddle_element_type *types,
                       size_t len, const double *rate) {
  return paddle_transfer_view(client, grads, types, len, rate) == NULL ? -1 : 0;
}

/* A parameter of a view, piece after piece; its length. */
static size_t copied(const paddle_view *view, int parameter, void *all, size_t room) {
  const void *content;
  size_t bytes, length = 0;
  int piece;
  for (piece = 0; piece < paddle_view_pieces(view, parameter); piece++) {
    CHECK(paddle_view_piece(view, parameter, piece, &content, &bytes) == 0 && bytes <= room - length);
    memcpy((char *)all + length, content, bytes);
    length += bytes;
  }
  return length;
}

static void wrong_views(paddle_pserver_client *client) {
  const double wrong = -1.0;
  const paddle_element_type integer = PADDLE_ELEMENT_TYPE_INT32, none = (paddle_element_type)99;
  const paddle_element_type half[2] = {PADDLE_ELEMENT_TYPE_FLOAT32, PADDLE_ELEMENT_TYPE_FLOAT16};
  paddle_tensor grads[2];
  grads[0] = good();
  grads[1] = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d_gradient, sizeof d_gradient);
  REFUSED(view_status(NULL, grads, NULL, 1, NULL), "client is NULL");
  REFUSED(view_status(client, NULL, NULL, 1, NULL), "grads is NULL");
  REFUSED(view_status(client, grads, NULL, 0, NULL), "grads: length 0; expected at least one");
  REFUSED(view_status(client, grads, NULL, (size_t)-1, NULL), "no array is that long");
  REFUSED(view_status(client, grads, NULL, 1, &wrong), "learning rate -1; expected a finite number");
  REFUSED(view_status(client, grads, &integer, 1, NULL), "\"w\": its value as int32; expected float32");
  REFUSED(view_status(client, grads, &none, 1, NULL), "\"w\": element type 99");
  REFUSED(view_status(client, grads, half, 2, NULL), "\"d\": its value as float16; expected float64");
  grads[1].content_len = 8;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "\"d\": 8 bytes; expected 16");
  grads[1].content_len = 12;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "content_len 12; expected a multiple of 8");
  grads[1].content_len = sizeof d_gradient;
  grads[1].element_type = PADDLE_ELEMENT_TYPE_INT64;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "element type int64; expected float64");
  grads[1].element_type = none;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "\"d\": element type 99");
  grads[1] = good();
  REFUSED(view_status(client, grads, NULL, 2, NULL), "twice");
  grads[1].content = NULL;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "\"w\": content is NULL");
  grads[1].name = NULL;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "grads[1].name is NULL");
  grads[1] = good();
  grads[1].name = "nobody";
  REFUSED(view_status(client, grads, NULL, 2, NULL), "nobody");
  grads[1] = of_ids(ids, 4, rows);
  REFUSED(view_status(client, grads, NULL, 2, NULL), "\"table\": 4 ids of rows in a call about whole");
  grads[1].ids_len = 0;
  REFUSED(view_status(client, grads, NULL, 2, NULL), "\"table\" is sparse");
}

/* A view has one version, of these gradients; what is refused has changed nothing. */
static void viewed(paddle_pserver_client *client) {
  const double slow = 0.125;
  const paddle_element_type types[2] = {PADDLE_ELEMENT_TYPE_BFLOAT16, PADDLE_ELEMENT_TYPE_FLOAT64};
  uint16_t half[COUNT];
  paddle_tensor grads[2];
  paddle_view *view;
  int index;
  wrong_views(client);
  grads[0] = good();
  grads[1] = tensor("d", PADDLE_ELEMENT_TYPE_FLOAT64, d_gradient, sizeof d_gradient);
  view = paddle_transfer_view(client, grads, NULL, 1, &slow);
  CHECK(view != NULL);
  update(slow);
  CHECK(copied(view, 0, fetched, sizeof fetched) == sizeof w && memcmp(fetched, w, sizeof w) == 0);
  REFUSED(view_status(client, grads, NULL, 1, NULL), "\"w\": a view holds it");
  CHECK(paddle_transfer(client, grads, NULL, 1, NULL) == 0);
  memset(fetched, 0, sizeof fetched);
  CHECK(copied(view, 0, fetched, sizeof fetched) == sizeof w && memcmp(fetched, w, sizeof w) == 0);
  update(0.5);
  CHECK(paddle_view_release(view) == 0);

  view = paddle_transfer_view(client, grads, types, 2, NULL);
  CHECK(view != NULL);
  update(0.5);
  for (index = 0; index < 2; index++) d[index] -= 0.5 * d_gradient[index];
  CHECK(copied(view, 0, half, sizeof half) == sizeof half && is_half_of_w(half));
  CHECK(copied(view, 1, d_fetched, sizeof d_fetched) == sizeof d && memcmp(d_fetched, d, sizeof d) == 0);
  CHECK(paddle_view_release(view) == 0);
}

/* A gradient in the library's memory, which stays while a call uses it. */
static void from_buffer(paddle_pserver_client *client) {
  paddle_tensor grad = good(), dst = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched);
  paddle_call *call;
  grad.content = paddle_buffer_alloc(client, sizeof gradient);
  CHECK(grad.content != NULL);
  memcpy(grad.content, gradient, sizeof gradient);
  call = paddle_transfer_start(client, &grad, &dst, 1, NULL);
  CHECK(call != NULL);
  REFUSED(paddle_buffer_free(client, grad.content), "used by a call");
  CHECK(paddle_wait(call) == 0);
  update(0.5);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
  CHECK(paddle_transfer(client, &grad, &dst, 1, NULL) == 0);
  update(0.5);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
  CHECK(paddle_buffer_free(client, grad.content) == 0);
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

/* A state with one tensor, of the caller. */
static paddle_state of_one(const paddle_tensor *one, uint64_t updates) {
  paddle_state made;
  memset(&made, 0, sizeof made);
  made.tensors = one;
  made.tensors_len = 1;
  made.updates = updates;
  return made;
}

static int get_status(paddle_pserver_client *client, const char *name, const uint64_t *which, size_t len) {
  return paddle_get_state(client, name, which, len) == NULL ? -1 : 0;
}

static void states(paddle_pserver_client *client) {
  paddle_rate_change change = {1, 0.5};
  paddle_state *found, state;
  paddle_tensor one, none[2];
  int index;
  REFUSED(get_status(NULL, "w", NULL, 0), "client is NULL");
  REFUSED(get_status(client, NULL, NULL, 0), "name is NULL");
  REFUSED(get_status(client, "w", NULL, 1), "ids is NULL");
  REFUSED(get_status(client, "w", ids, 2), "\"w\": 2 ids; expected none, as it is not sparse");
  REFUSED(get_status(client, "nobody", NULL, 0), "nobody");
  found = paddle_get_state(client, "d", NULL, 0);
  CHECK(found != NULL && found->tensors_len == 0 && found->updates == 1);
  CHECK(paddle_set_state(client, "d", found, 1) == 0);
  paddle_free(found);
  found = paddle_get_state(client, "w", NULL, 0);
  CHECK(found != NULL && found->tensors_len == 1 && found->updates == 7 && found->rates_len == 0);
  one = found->tensors[0];
  CHECK(one.element_type == PADDLE_ELEMENT_TYPE_FLOAT32 && one.content_len == sizeof velocity && one.ids_len == 0);
  CHECK(memcmp(one.content, velocity, sizeof velocity) == 0);

  state = of_one(&one, 7);
  REFUSED(paddle_set_state(NULL, "w", &state, 1), "client is NULL");
  REFUSED(paddle_set_state(client, "w", NULL, 1), "state is NULL");
  REFUSED(paddle_set_state(client, "w", &state, 0), "expected is_last 1");
  state.rates = &change;
  state.rates_len = 1;
  REFUSED(paddle_set_state(client, "w", &state, 1), "no rates");
  state = of_one(NULL, 7);
  REFUSED(paddle_set_state(client, "w", &state, 1), "tensors is NULL");
  state.tensors_len = 0;
  REFUSED(paddle_set_state(client, "w", &state, 1), "each once");
  state = of_one(&one, 7);
  one.name = "other";
  REFUSED(paddle_set_state(client, "w", &state, 1), "[\"other\"]; expected [\"");
  one.name = found->tensors[0].name;
  one.content_len -= 4;
  REFUSED(paddle_set_state(client, "w", &state, 1), "79996 bytes of state");
  one.content_len = sizeof velocity;
  one.element_type = PADDLE_ELEMENT_TYPE_FLOAT64;
  REFUSED(paddle_set_state(client, "w", &state, 1), "of float64; expected float32");
  one.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  one.ids = ids;
  one.ids_len = 1;
  REFUSED(paddle_set_state(client, "w", &state, 1), "with 1 ids; expected those of the first state, of a table");
  one.ids_len = 0;
  for (index = 0; index < COUNT; index++) velocity[index] = (float)(index % 7);
  one.content = velocity;
  state.updates = 40;
  CHECK(paddle_set_state(client, "w", &state, 1) == 0);
  paddle_free(found);
  found = paddle_get_state(client, "w", NULL, 0);
  CHECK(found != NULL && found->tensors_len == 1 && found->updates == 40);
  CHECK(memcmp(found->tensors[0].content, velocity, sizeof velocity) == 0);
  paddle_free(found);

  /* The next update goes on from the state that was set, and from the value that was set. */
  for (index = 0; index < COUNT; index++) w[index] = (float)index;
  one = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w);
  REFUSED(paddle_set_tensors(NULL, &one, 1), "client is NULL");
  REFUSED(paddle_set_tensors(client, NULL, 1), "values is NULL");
  REFUSED(paddle_set_tensors(client, &one, 0), "at least one");
  none[0] = of_ids(ids, 4, rows);
  REFUSED(paddle_set_tensors(client, none, 1), "row 7 is there twice");
  none[0].name = "w";
  REFUSED(paddle_set_tensors(client, none, 1), "\"w\": 4 ids of rows in a call about whole");
  none[0] = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT16, w, sizeof w);
  REFUSED(paddle_set_tensors(client, none, 1), "element type float16; expected float32");
  CHECK(paddle_set_tensors(client, &one, 1) == 0);
  one = good();
  none[0] = tensor("w", PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched);
  CHECK(paddle_transfer(client, &one, none, 1, NULL) == 0);
  update(0.5);
  CHECK(memcmp(fetched, w, sizeof w) == 0);
}

/* Rows of a table, their state, and the state of another table that takes both over. */
static void row_states(paddle_pserver_client *client) {
  static const uint64_t other[1] = {5};
  const double slow = 0.25;
  uint64_t *listed = NULL;
  size_t len = 0;
  float value[3 * WIDTH], again[3 * WIDTH];
  paddle_state *found, part;
  paddle_tensor all, tensors[2];
  int index;
  REFUSED(paddle_list_rows(NULL, "moved", &listed, &len), "client is NULL");
  REFUSED(paddle_list_rows(client, "moved", NULL, &len), "ids is NULL");
  REFUSED(paddle_list_rows(client, "moved", &listed, NULL), "len is NULL");
  REFUSED(paddle_list_rows(client, "w", &listed, &len), "not sparse");
  CHECK(paddle_list_rows(client, "moved", &listed, &len) == 0 && len == 0);
  paddle_free(listed);
  for (index = 0; index < 3 * WIDTH; index++) value[index] = (float)(index + 1);
  all = tensor("moved", PADDLE_ELEMENT_TYPE_FLOAT32, value, sizeof value);
  all.ids = ids + 1;
  all.ids_len = 3;
  CHECK(paddle_transfer(client, &all, NULL, 1, &slow) == 0);
  CHECK(paddle_list_rows(client, "moved", &listed, &len) == 0 && len == 3);
  CHECK(listed[0] == 2 && listed[1] == 7 && listed[2] == 99);
  paddle_free(listed);
  found = paddle_get_state(client, "moved", ids + 1, 3);
  CHECK(found != NULL && found->tensors_len == 1 && found->updates == 1);
  CHECK(found->tensors[0].ids_len == 3 && memcmp(found->tensors[0].ids, ids + 1, 3 * sizeof *ids) == 0);
  for (index = 0; index < 3 * WIDTH; index++) value[index] *= -0.25f; /* v = -0.25 * g */
  CHECK(memcmp(found->tensors[0].content, value, sizeof value) == 0);
  CHECK(found->rates_len == 1 && found->rates[0].update == 1);
  CHECK(found->rates[0].learning_rate >= slow && found->rates[0].learning_rate <= slow);

  /* By parts: the last one brings the updates. */
  CHECK(paddle_transfer(client, NULL, &all, 1, NULL) == 0);
  all.name = "heir";
  CHECK(paddle_set_tensors(client, &all, 1) == 0);
  tensors[0] = found->tensors[0];
  part = *found;
  part.tensors = tensors;
  tensors[0].ids_len = 2;
  REFUSED(paddle_set_state(client, "heir", &part, 0), "36 bytes of state");
  tensors[0].content_len = 2 * WIDTH * sizeof(float);
  tensors[1] = tensors[0];
  tensors[1].ids = other;
  part.tensors_len = 2;
  REFUSED(paddle_set_state(client, "heir", &part, 0), "2 ids; expected those of the first state");
  part.tensors_len = 1;
  CHECK(paddle_set_state(client, "heir", &part, 0) == 0);
  tensors[0].ids += 2;
  tensors[0].ids_len = 1;
  tensors[0].content = (float *)found->tensors[0].content + 2 * WIDTH;
  tensors[0].content_len = WIDTH * sizeof(float);
  CHECK(paddle_set_state(client, "heir", &part, 1) == 0);
  paddle_free(found);
  all.content = rows; /* both tables go on alike */
  for (index = 0; index < 2; index++) {
    paddle_tensor grad = all, back = all;
    grad.name = back.name = index == 0 ? "moved" : "heir";
    back.content = index == 0 ? value : again;
    CHECK(paddle_transfer(client, &grad, &back, 1, NULL) == 0);
  }
  CHECK(memcmp(value, again, sizeof value) == 0);
  for (index = 0; index < 2; index++) { /* a row without gradients has decayed with both rates */
    paddle_tensor back = of_ids(other, 1, index == 0 ? value : again);
    back.name = index == 0 ? "moved" : "heir";
    CHECK(paddle_transfer(client, NULL, &back, 1, NULL) == 0);
  }
  CHECK(value[0] < 1.0f && memcmp(value, again, WIDTH * sizeof *value) == 0);
  found = paddle_get_state(client, "heir", NULL, 0);
  CHECK(found != NULL && found->updates == 2 && found->rates_len == 2);
  CHECK(found->rates[1].update == 2 && found->rates[1].learning_rate < 0);
  CHECK(paddle_set_state(client, "heir", found, 1) == 0);
  part = *found;
  part.rates_len = (size_t)-1;
  REFUSED(paddle_set_state(client, "heir", &part, 1), "rates: length");
  paddle_free(found);
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
  from_buffer(client);
  states(client);
  row_states(client);
  viewed(client);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
