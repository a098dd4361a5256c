/* A program in text is loaded, fed, stepped, read and saved; whatever is wrong gives a status and a text.
   argv[1] is a folder. */
#include <math.h>
#include <paddle_pserver.h>

#include "check.h"

static const char *TEXT =
    "block 0 {\n"
    "    data x: float32[batch, 2]\n"
    "    data target: float32[batch, 1]\n"
    "    parameter w: float32[2, 1]\n"
    "    initialise w = fill(value=0.5)\n"
    "    forward y = matmul(x, w)\n"
    "    forward error = sub(y, target)\n"
    "    forward squares = mul(error, error)\n"
    "    forward loss = mean(squares)\n"
    "}\n";
static const char *OPTIMIZER = "optimizer: SGD const_lr { learning_rate: 0.25 }";
/* The same. */
static const char *BINARY = "base64:CAFiCQkAAAAAAADQPw==";

static float x[4] = {1.0f, 0.0f, 0.0f, 2.0f};
static float target[2] = {1.0f, 2.0f};

static paddle_tensor data(const char *name, paddle_element_type type, void *content, size_t bytes) {
  paddle_tensor made;
  memset(&made, 0, sizeof made);
  made.name = name;
  made.element_type = type;
  made.content = content;
  made.content_len = bytes;
  return made;
}

static void no_program(paddle_program *program, const char *words) {
  paddle_tensor fed = data("x", PADDLE_ELEMENT_TYPE_FLOAT32, x, sizeof x);
  double value;
  REFUSED(paddle_program_steps_before(program), words);
  REFUSED(paddle_program_feed(program, &fed, 1), words);
  REFUSED(paddle_program_step(program), words);
  REFUSED(paddle_program_value(program, "loss", &value), words);
  REFUSED(paddle_program_fetch(program, &fed), words);
  REFUSED(paddle_program_save(program, "model.safetensors"), words);
  CHECK(fed.content == x && fed.content_len == sizeof x);
}

static void not_loaded(paddle_program *program, const char *words) {
  CHECK(program == NULL);
  if (strstr(paddle_last_error(), words) == NULL) {
    fprintf(stderr, "said: %s\nexpected: %s\n", paddle_last_error(), words);
    exit(1);
  }
}

static void wrong_programs(paddle_pserver_client *client) {
  not_loaded(paddle_program_load(NULL, TEXT, NULL, OPTIMIZER, 2), "client is NULL");
  not_loaded(paddle_program_load(client, NULL, NULL, OPTIMIZER, 2), "program is NULL");
  not_loaded(paddle_program_load(client, "", NULL, OPTIMIZER, 2), "No such file");
  not_loaded(paddle_program_load(client, "none.program", NULL, OPTIMIZER, 2), "none.program: No such file");
  not_loaded(paddle_program_load(client, "\xff{", NULL, OPTIMIZER, 2), "program: not UTF-8");
  not_loaded(paddle_program_load(client, "block 0 { data x: float33[] }", NULL, OPTIMIZER, 2), "line 1, column 19");
  not_loaded(paddle_program_load(client, "block 0 { parameter w: float32[2] }", NULL, OPTIMIZER, 2), "\"w\"");
  not_loaded(paddle_program_load(client, TEXT, "los", OPTIMIZER, 2), "\"los\"");
  not_loaded(paddle_program_load(client, TEXT, "squares", OPTIMIZER, 2), "\"squares\"");
  not_loaded(paddle_program_load(client, TEXT, "", OPTIMIZER, 2), "loss");
  not_loaded(paddle_program_load(client, TEXT, NULL, NULL, 2), "found no optimizer");
  not_loaded(paddle_program_load(client, TEXT, NULL, "optimizer: Adma", 2), "Adma");
  not_loaded(paddle_program_load(client, TEXT, NULL, "base64:!!", 2), "base64");
  not_loaded(paddle_program_load(client, TEXT, NULL, OPTIMIZER, 0), "batch: 0 rows");
  not_loaded(paddle_program_load(client, TEXT, NULL, OPTIMIZER, -1), "batch: -1 rows");
}

static void wrong_data(paddle_program *program) {
  paddle_tensor fed[2];
  const uint64_t ids[2] = {0, 1};
  int64_t number = 1;
  fed[0] = data("x", PADDLE_ELEMENT_TYPE_FLOAT32, x, sizeof x);
  REFUSED(paddle_program_feed(program, NULL, 1), "data is NULL");
  REFUSED(paddle_program_feed(program, fed, 0), "at least one");
  REFUSED(paddle_program_feed(program, fed, (size_t)-1), "no array is that long");
  REFUSED(paddle_program_feed(program, fed, ((size_t)1 << 58) + 1), "length 288230376151711745; no array is that long");
  fed[1] = data("z", PADDLE_ELEMENT_TYPE_FLOAT32, target, sizeof target);
  REFUSED(paddle_program_feed(program, fed, 2), "found no data \"z\" in the program; expected one of x, target");
  fed[1].name = (char *)"w";
  REFUSED(paddle_program_feed(program, fed, 2), "found no data \"w\"");
  fed[1].name = NULL;
  REFUSED(paddle_program_feed(program, fed, 2), "data[1].name is NULL");
  fed[1] = data("target", PADDLE_ELEMENT_TYPE_INT64, &number, sizeof number);
  REFUSED(paddle_program_feed(program, fed, 2), "found elements of int64; expected float32");
  fed[1] = data("target", (paddle_element_type)99, target, sizeof target);
  REFUSED(paddle_program_feed(program, fed, 2), "element type 99");
  fed[1] = data("target", PADDLE_ELEMENT_TYPE_FLOAT32, NULL, sizeof target);
  REFUSED(paddle_program_feed(program, fed, 2), "content is NULL");
  fed[1] = data("target", PADDLE_ELEMENT_TYPE_FLOAT32, target, 6);
  REFUSED(paddle_program_feed(program, fed, 2), "content_len 6; expected a multiple of 4");
  fed[1].content_len = 0;
  REFUSED(paddle_program_feed(program, fed, 2), "content_len 0; expected a multiple of 4");
  fed[1].content_len = (size_t)-4;
  REFUSED(paddle_program_feed(program, fed, 2), "content_len 9223372036854775807; expected a multiple of 4");
  fed[1] = data("target", PADDLE_ELEMENT_TYPE_FLOAT32, target, sizeof target);
  fed[1].ids = ids;
  fed[1].ids_len = 2;
  REFUSED(paddle_program_feed(program, fed, 2), "\"target\": 2 ids of rows in a call about whole tensors");
  fed[1] = data("x", PADDLE_ELEMENT_TYPE_FLOAT32, x, 3 * sizeof *x);
  REFUSED(paddle_program_feed(program, &fed[1], 1), "found 12 bytes; expected a multiple of 8");
}

static void feed(paddle_program *program, size_t rows) {
  paddle_tensor fed[2];
  fed[0] = data("x", PADDLE_ELEMENT_TYPE_FLOAT32, x, sizeof x);
  fed[1] = data("target", PADDLE_ELEMENT_TYPE_FLOAT32, target, rows * sizeof *target);
  CHECK(paddle_program_feed(program, fed, 2) == 0);
}

static void wrong_values(paddle_program *program, const char *folder) {
  char path[4096];
  float place[2] = {8.0f, 9.0f};
  const uint64_t ids[1] = {0};
  paddle_tensor dst = data(NULL, PADDLE_ELEMENT_TYPE_FLOAT32, place, sizeof place);
  double value = 7.0;
  REFUSED(paddle_program_value(program, NULL, &value), "name is NULL");
  REFUSED(paddle_program_value(program, "loss", NULL), "value is NULL");
  REFUSED(paddle_program_value(program, "none", &value), "found no scalar \"none\"");
  REFUSED(paddle_program_value(program, "", &value), "empty");
  CHECK(value > 6.9 && value < 7.1);
  REFUSED(paddle_program_fetch(program, NULL), "dst is NULL");
  REFUSED(paddle_program_fetch(program, &dst), "dst.name is NULL");
  dst.name = "none";
  REFUSED(paddle_program_fetch(program, &dst), "\"none\"");
  dst.name = "w";
  dst.ids = ids;
  dst.ids_len = 1;
  REFUSED(paddle_program_fetch(program, &dst), "\"w\": 1 ids of rows in a call about whole tensors");
  dst.ids_len = 0;
  dst.content_len = 4;
  REFUSED(paddle_program_fetch(program, &dst), "\"w\": a destination of 4 bytes of float32; expected 8 bytes of");
  dst.content_len = 12;
  REFUSED(paddle_program_fetch(program, &dst), "a destination of 12 bytes of float32; expected 8 bytes");
  dst.content_len = ((size_t)1 << 32) + sizeof place;
  REFUSED(paddle_program_fetch(program, &dst), "a destination of 4294967304 bytes of float32; expected 8 bytes");
  dst.content_len = (size_t)-1;
  REFUSED(paddle_program_fetch(program, &dst), "content_len 9223372036854775807");
  dst.content_len = sizeof place;
  dst.element_type = PADDLE_ELEMENT_TYPE_INT32;
  REFUSED(paddle_program_fetch(program, &dst), "a destination of 8 bytes of int32; expected 8 bytes of float32");
  dst.element_type = (paddle_element_type)99;
  REFUSED(paddle_program_fetch(program, &dst), "element type 99");
  CHECK(dst.content == place && dst.content_len == sizeof place && dst.element_type == (paddle_element_type)99);
  dst.content = NULL;
  dst.name = "none";
  REFUSED(paddle_program_fetch(program, &dst), "\"none\"");
  CHECK(dst.content == NULL && dst.content_len == sizeof place);
  CHECK(place[0] > 7.9f && place[0] < 8.1f && place[1] > 8.9f);
  REFUSED(paddle_program_save(program, NULL), "path is NULL");
  REFUSED(paddle_program_save(program, "model.bin"), "expected a file that ends in .safetensors");
  snprintf(path, sizeof path, "%s/none/model.safetensors", folder);
  REFUSED(paddle_program_save(program, path), "No such file");
}

int main(int count, char **arguments) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  paddle_program *program;
  paddle_tensor found = data("w", PADDLE_ELEMENT_TYPE_INT32, NULL, 99);
  float w[2] = {0.0f, 0.0f};
  paddle_tensor place = data("w", PADDLE_ELEMENT_TYPE_FLOAT32, w, sizeof w);
  double loss = 0.0;
  char path[4096];
  int step;
  FILE *file;

  CHECK(count == 2 && client != NULL);
  no_program(NULL, "program is NULL; expected a program");
  no_program((paddle_program *)client, "was never given");
  wrong_programs(client);
  program = paddle_program_load(client, TEXT, NULL, OPTIMIZER, 2);
  CHECK(program != NULL && paddle_program_steps_before(program) == 0);
  REFUSED(paddle_program_step(program), "\"x\"");
  wrong_data(program);
  feed(program, 1);
  REFUSED(paddle_program_step(program), "batch");
  wrong_values(program, arguments[1]);

  /* The loss is ((w0 - 1)^2 + (2 w1 - 2)^2) / 2. */
  feed(program, 2);
  CHECK(paddle_program_step(program) == 0);
  CHECK(paddle_program_value(program, "loss", &loss) == 0 && fabs(loss - (0.25 + 1.0) / 2.0) < 1e-6);
  CHECK(paddle_program_fetch(program, &place) == 0);
  CHECK(place.element_type == PADDLE_ELEMENT_TYPE_FLOAT32 && place.content == w && place.content_len == sizeof w);
  CHECK(fabsf(w[0] - 0.625f) < 1e-6f && fabsf(w[1] - 1.0f) < 1e-6f);
  REFUSED(paddle_program_value(program, "squares", &loss), "found no scalar \"squares\"");
  for (step = 0; step < 50; step++) {
    CHECK(paddle_program_step(program) == 0);
  }
  CHECK(paddle_program_fetch(program, &found) == 0 && found.content != NULL && found.content_len == sizeof w);
  CHECK(strcmp(found.name, "w") == 0 && found.element_type == PADDLE_ELEMENT_TYPE_FLOAT32);
  memcpy(w, found.content, sizeof w);
  CHECK(fabsf(w[0] - 1.0f) < 1e-3f && fabsf(w[1] - 1.0f) < 1e-3f);
  paddle_free(found.content);
  found = data("y", PADDLE_ELEMENT_TYPE_FLOAT32, NULL, 0);
  CHECK(paddle_program_fetch(program, &found) == 0 && found.content_len == 2 * sizeof *w);
  memcpy(w, found.content, sizeof w);
  CHECK(fabsf(w[0] - 1.0f) < 1e-3f && fabsf(w[1] - 2.0f) < 1e-3f);
  paddle_free(found.content);
  snprintf(path, sizeof path, "%s/model.safetensors", arguments[1]);
  CHECK(paddle_program_save(program, path) == 0);
  file = fopen(path, "rb");
  CHECK(file != NULL);
  fclose(file);
  paddle_program_release(program);
  no_program(program, "program was released already");
  paddle_program_release(program);
  paddle_program_release(NULL);

  /* The job is initialised, so the next one goes on with it. */
  program = paddle_program_load(client, TEXT, "loss", BINARY, 2);
  CHECK(program != NULL && paddle_program_steps_before(program) == 51);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  no_program(program, "the program's client was released before the program");
  return 0;
}
