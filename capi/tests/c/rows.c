/* Parameters that are updated by rows: declared, sent, fetched, saved, and refused. */
#include <paddle_pserver.h>

#include "check.h"

enum { WIDTH = 3 };

static const uint64_t ids[4] = {7, 2, 7, 99};
static float values[4 * WIDTH], fetched[5 * WIDTH], whole[4] = {1.0f, 2.0f, 3.0f, 4.0f};

static paddle_rows rows(const char *name, const uint64_t *which, int count, float *content, int content_len) {
  paddle_rows made;
  made.name = (char *)name;
  made.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  made.ids = which;
  made.ids_len = count;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static void refused(paddle_pserver_client *client) {
  static const uint64_t beyond[1] = {100};
  const char *names[1] = {"table"};
  paddle_parameter place;
  paddle_rows one = rows("table", ids, 4, values, sizeof values);
  memset(&place, 0, sizeof place);
  place.content = values;
  place.content_len = 4;
  REFUSED(paddle_get_params(client, names, &place, 1), "parameter \"table\" is sparse");
  REFUSED(paddle_send_rows(NULL, &one, 1), "client is NULL");
  REFUSED(paddle_send_rows(client, NULL, 1), "grads is NULL");
  REFUSED(paddle_send_rows(client, &one, 0), "at least one");
  REFUSED(paddle_get_rows(client, NULL, 1), "dst is NULL");
  one = rows("table", NULL, 4, values, sizeof values);
  REFUSED(paddle_send_rows(client, &one, 1), "ids is NULL");
  one = rows("table", ids, -1, values, sizeof values);
  REFUSED(paddle_send_rows(client, &one, 1), "length -1");
  one = rows("table", ids, 4, NULL, sizeof values);
  REFUSED(paddle_send_rows(client, &one, 1), "content is NULL");
  REFUSED(paddle_get_rows(client, &one, 1), "content is NULL");
  one = rows("table", ids, 4, values, sizeof values - 4);
  REFUSED(paddle_send_rows(client, &one, 1), "parameter \"table\": 44 bytes of values for 4 rows; expected 48");
  REFUSED(paddle_get_rows(client, &one, 1), "a destination of 44 bytes for 4 rows; expected 48");
  one = rows("table", beyond, 1, values, WIDTH * sizeof *values);
  REFUSED(paddle_send_rows(client, &one, 1), "row 100 at place 0 of 1; expected ids below 100");
  REFUSED(paddle_get_rows(client, &one, 1), "row 100");
  one = rows("nobody", ids, 4, values, sizeof values);
  REFUSED(paddle_send_rows(client, &one, 1), "nobody");
  one = rows("whole", ids, 1, values, 4);
  REFUSED(paddle_send_rows(client, &one, 1), "not sparse");
  REFUSED(paddle_get_rows(client, &one, 1), "not sparse");
  one = rows("table", ids, 4, values, sizeof values);
  one.element_type = PADDLE_ELEMENT_TYPE_FLOAT64;
  REFUSED(paddle_send_rows(client, &one, 1), "rows of float64; expected float32");
  REFUSED(paddle_get_rows(client, &one, 1), "element type float64; expected float32");
  one = rows("table", (const uint64_t *)(const void *)fetched, 4, fetched, sizeof values);
  REFUSED(paddle_get_rows(client, &one, 1), "overlap");
}

int main(void) {
  static const uint64_t wanted[5] = {7, 50, 7, 2, 99};
  static const uint64_t far[1] = {UINT64_C(1) << 62};
  paddle_pserver_client *client = paddle_new_pserver_client();
  paddle_parameter dense;
  paddle_rows one, two[2];
  int index;
  CHECK(client != NULL);
  for (index = 0; index < 4 * WIDTH; index++) values[index] = (float)(index / WIDTH + 1);
  dense.name = (char *)"whole";
  dense.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  dense.content = whole;
  dense.content_len = sizeof whole;
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  CHECK(paddle_init_param(client, dense, NULL) == 0);
  CHECK(paddle_init_rows(client, "table", PADDLE_ELEMENT_TYPE_FLOAT32,
                         "sparse { height: 100 width: 3 constant { value: 10 } }") == 0);
  CHECK(paddle_init_rows(client, "grows", PADDLE_ELEMENT_TYPE_FLOAT32, "sparse { width: 1 rows: 1000 }") == 0);
  REFUSED(paddle_init_rows(client, "table", PADDLE_ELEMENT_TYPE_FLOAT32, "sparse { height: 1 width: 1 }"), "already");
  REFUSED(paddle_init_rows(client, "other", PADDLE_ELEMENT_TYPE_FLOAT32, NULL), "expected sparse");
  REFUSED(paddle_init_rows(client, NULL, PADDLE_ELEMENT_TYPE_FLOAT32, NULL), "name is NULL");
  REFUSED(paddle_init_rows(client, "other", 9, NULL), "element type 9");
  REFUSED(paddle_init_rows(client, "other", PADDLE_ELEMENT_TYPE_FLOAT32, "sparse { width: 3 }"), "neither height nor rows");
  REFUSED(paddle_init_rows(client, "other", PADDLE_ELEMENT_TYPE_FLOAT32, "sparse { height: 3 }"), "neither width");
  REFUSED(paddle_init_rows(client, "other", PADDLE_ELEMENT_TYPE_FLOAT32, "clip_norm: 1 sparse { height: 3 width: 1 }"),
          "clip_norm");
  CHECK(paddle_finish_init_params(client) == 0);
  refused(client);

  one = rows("table", ids, 4, values, sizeof values);
  CHECK(paddle_send_rows(client, &one, 1) == 0);
  one = rows("table", wanted, 5, fetched, sizeof fetched);
  CHECK(paddle_get_rows(client, &one, 1) == 0);
  for (index = 0; index < WIDTH; index++) {
    CHECK(fetched[index] == 8.0f && fetched[2 * WIDTH + index] == 8.0f); /* 10 - 0.5 * (1 + 3) */
    CHECK(fetched[WIDTH + index] == 10.0f);
    CHECK(fetched[3 * WIDTH + index] == 9.0f && fetched[4 * WIDTH + index] == 8.0f);
  }

  /* Ids of any size, and a trainer that has no rows to send. */
  two[0] = rows("grows", far, 1, values, sizeof *values);
  two[1] = rows("table", NULL, 0, NULL, 0);
  CHECK(paddle_send_rows(client, two, 2) == 0);
  one = rows("grows", far, 1, fetched, sizeof *fetched);
  CHECK(paddle_get_rows(client, &one, 1) == 0);
  CHECK(fetched[0] == -0.5f);
  two[1] = two[0];
  REFUSED(paddle_send_rows(client, two, 2), "twice");
  CHECK(paddle_save_model(client, "rows.safetensors") == 0);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
