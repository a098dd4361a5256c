/* Lengths above 2^31, without so much memory: pages that lie at many addresses, or that nobody touches. With the
   argument "program" they are those of a program's data; with "large" it takes such data, in 4 GiB of memory. */
#define _GNU_SOURCE
#include <paddle_pserver.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

enum { WIDTH = 16384, ROWS = 32769, SHARED_ROWS = 512 };

static const size_t row_bytes = WIDTH * sizeof(float);

/* Rows above 2 GiB in all, of which each SHARED_ROWS share their pages with those before them. The last is alone. */
static float *many_rows(void) {
  const size_t shared = SHARED_ROWS * row_bytes;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *start = mmap(NULL, ROWS * row_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  int file = memfd_create("rows", 0), index;
  CHECK(start != MAP_FAILED && file >= 0 && ftruncate(file, (off_t)shared) == 0);
  for (index = 0; index < ROWS / SHARED_ROWS; index++) {
    char *part = start + (size_t)index * shared;
    CHECK(mmap(part, shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == part);
  }
  close(file);
  return (float *)(void *)start;
}

/* All elements of a row are one value. */
static int is_filled(const float *row, float value) {
  int index;
  for (index = 0; index < WIDTH; index++) {
    if (row[index] < value || value < row[index]) return 0;
  }
  return 1;
}

/* Rows with 1 and 2 in turns, and 4 in the last. */
static void fill(float *rows) {
  size_t index;
  for (index = 0; index < (size_t)SHARED_ROWS * WIDTH; index++) rows[index] = index / WIDTH % 2 == 0 ? 1.0f : 2.0f;
  for (index = 0; index < WIDTH; index++) rows[(size_t)(ROWS - 1) * WIDTH + index] = 4.0f;
}

/* Data above 2^31, from which a program makes a gradient, and which is fetched. */
static void fed(paddle_program *program, float *rows) {
  float w = 1.0f;
  paddle_tensor x = {"x", PADDLE_ELEMENT_TYPE_FLOAT32, rows, ROWS * row_bytes, NULL, 0};
  paddle_tensor place = {"w", PADDLE_ELEMENT_TYPE_FLOAT32, &w, sizeof w, NULL, 0};
  fill(rows);
  CHECK(paddle_program_feed(program, &x, 1) == 0);
  CHECK(paddle_program_step(program) == 0);
  /* 16,384 rows each of ones and of twos, and one of fours. */
  CHECK(paddle_program_fetch(program, &place) == 0 && w == -(float)WIDTH * (16384.0f + 2.0f * 16384.0f + 4.0f));
  memset(rows, 0, SHARED_ROWS * row_bytes);
  memset(rows + (size_t)(ROWS - 1) * WIDTH, 0, row_bytes);
  CHECK(paddle_program_fetch(program, &x) == 0);
  CHECK(is_filled(rows, 1.0f) && is_filled(rows + WIDTH, 2.0f) && is_filled(rows + (size_t)(ROWS - 1) * WIDTH, 4.0f));
}

static int of_a_program(paddle_pserver_client *client, void *untouched, float *rows, int is_large) {
  static const char *text =
      "block 0 {\n"
      "    data x: float32[batch, 16384]\n"
      "    parameter w: float32[1, 1]\n"
      "    initialise w = fill(value=0.0)\n"
      "    forward sums = reduce_sum(x, axes=[1], keep=true)\n"
      "    forward y = matmul(sums, w)\n"
      "    forward loss = reduce_sum(y)\n"
      "}\n";
  static const char *optimizer = "optimizer: SGD const_lr { learning_rate: 1 }";
  paddle_program *program = paddle_program_load(client, text, NULL, optimizer, ROWS);
  paddle_tensor x = {"x", PADDLE_ELEMENT_TYPE_FLOAT32, untouched, ((size_t)1 << 32) + sizeof(float), NULL, 0};
  paddle_tensor w = {"w", PADDLE_ELEMENT_TYPE_FLOAT32, untouched, ((size_t)1 << 32) + sizeof(float), NULL, 0};
  CHECK(program != NULL);
  /* Lengths that 32 bits would cut to 4: no row of data, and the parameter's. */
  REFUSED(paddle_program_feed(program, &x, 1), "found 4294967300 bytes; expected a multiple of 65536");
  REFUSED(paddle_program_fetch(program, &w), "4294967300 bytes of float32; expected 4 bytes of float32");
  if (is_large) fed(program, rows);
  paddle_program_release(program);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}

int main(int count, char **arguments) {
  static uint64_t ids[ROWS];
  static float w[2] = {1.0f, 2.0f};
  const size_t long_bytes = ((size_t)1 << 32) + sizeof w;
  paddle_pserver_client *client = paddle_new_pserver_client();
  float *rows = many_rows(), *last = rows + (size_t)(ROWS - 1) * WIDTH;
  void *untouched = mmap(NULL, long_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  paddle_tensor one;
  paddle_call *call = NULL;
  size_t index;
  CHECK(client != NULL && untouched != MAP_FAILED);
  if (count == 2) return of_a_program(client, untouched, rows, strcmp(arguments[1], "large") == 0);
  for (index = 0; index < ROWS; index++) ids[index] = index % 2;
  memset(&one, 0, sizeof one);
  one.name = "w";
  one.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  one.content = w;
  one.content_len = sizeof w;
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  CHECK(paddle_init_tensor(client, &one, NULL, 0, NULL) == 0);
  CHECK(paddle_init_rows(client, "table", PADDLE_ELEMENT_TYPE_FLOAT32,
                         "sparse { height: 4 width: 16384 constant { value: 10 } }") == 0);
  CHECK(paddle_finish_init_params(client) == 0);

  /* A length that 32 bits would cut to the right one. */
  one.content = untouched;
  one.content_len = long_bytes;
  REFUSED(paddle_transfer(client, &one, NULL, 1, NULL), "4294967304 bytes; expected 8");
  REFUSED(paddle_transfer(client, NULL, &one, 1, NULL), "4294967304 bytes; expected 8");
  REFUSED(paddle_transfer_start(client, &one, NULL, 1, NULL) == NULL ? -1 : 0, "4294967304 bytes; expected 8");
  REFUSED(paddle_transfer_view(client, &one, NULL, 1, NULL) == NULL ? -1 : 0, "4294967304 bytes; expected 8");
  REFUSED(paddle_set_tensors(client, &one, 1), "4294967304 bytes; expected 8");

  /* Gradients and places above 2^31: 16,385 times row 0, and 16,384 times row 1. */
  fill(rows);
  one.name = "table";
  one.content = rows;
  one.content_len = ROWS * row_bytes;
  one.ids = ids;
  one.ids_len = ROWS;
  CHECK(paddle_transfer(client, &one, NULL, 1, NULL) == 0);
  CHECK(paddle_transfer(client, NULL, &one, 1, NULL) == 0);
  CHECK(is_filled(rows, 10.0f - 0.5f * 16388.0f) && is_filled(rows + WIDTH, 10.0f - 0.5f * 32768.0f));
  CHECK(is_filled(last, 10.0f - 0.5f * 16388.0f));
  memset(last, 0, row_bytes);
  call = paddle_transfer_start(client, NULL, &one, 1, NULL);
  CHECK(call != NULL);
  CHECK(paddle_wait(call) == 0);
  CHECK(is_filled(last, 10.0f - 0.5f * 16388.0f));
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
