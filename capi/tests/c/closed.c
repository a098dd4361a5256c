/* A program closes every descriptor and opens files of its own, as one does that becomes a daemon: the client makes new
   connections, and the program's files are left alone. */
#define _POSIX_C_SOURCE 200809L
#include <paddle_pserver.h>

#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COUNT = 20000, FILES = 60 };

static int files[FILES];

/* Every number that the library had is a file of the program now. */
static void become_a_daemon(void) {
  char path[] = "/tmp/pserver-closed-XXXXXX";
  int number;
  for (number = 3; number < 256; number++) close(number);
  files[0] = mkstemp(path);
  CHECK(files[0] == 3 && unlink(path) == 0);
  for (number = 1; number < FILES; number++) {
    files[number] = dup(files[0]);
    CHECK(files[number] == 3 + number);
  }
}

/* They are open, and nothing was written to them. */
static void check_files(void) {
  struct stat first, other;
  int number;
  CHECK(fstat(files[0], &first) == 0 && S_ISREG(first.st_mode) && first.st_size == 0);
  for (number = 1; number < FILES; number++) {
    CHECK(fstat(files[number], &other) == 0 && other.st_ino == first.st_ino);
  }
}

int main(void) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  float *gradient, *value = calloc(COUNT, sizeof *value);
  paddle_parameter w, dst;
  int step, index;
  CHECK(client != NULL && value != NULL);
  gradient = paddle_buffer_alloc(client, COUNT * sizeof *gradient);
  CHECK(gradient != NULL);
  for (index = 0; index < COUNT; index++) gradient[index] = (float)index;
  w.name = (char *)"w";
  w.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  w.content = value;
  w.content_len = COUNT * (int)sizeof *value;
  dst = w;
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  CHECK(paddle_init_param(client, w, NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  w.content = gradient;
  for (step = 1; step <= 4; step++) {
    if (step == 3) become_a_daemon();
    CHECK(paddle_push_pull(client, &w, &dst, 1) == 0);
    for (index = 0; index < COUNT; index++) CHECK(value[index] == -0.5f * (float)(step * index));
  }
  check_files();
  CHECK(paddle_buffer_path(client, gradient) == 0);
  CHECK(paddle_leave(client) == 0);
  CHECK(paddle_buffer_free(client, gradient) == 0);
  paddle_pserver_client_release(client);
  check_files();
  free(value);
  return 0;
}
