/* A child process cannot use its parent's client, and can make one of its own. argv[1] is the reader's options. */
#define _POSIX_C_SOURCE 200809L
#include <paddle_pserver.h>

#include "check.h"

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static float fetch(paddle_pserver_client *client) {
  const char *names[1] = {"w"};
  float value = 0.0f;
  paddle_parameter dst;
  memset(&dst, 0, sizeof dst);
  dst.content = &value;
  dst.content_len = (int)sizeof value;
  CHECK(paddle_get_params(client, names, &dst, 1) == 0);
  return value;
}

static void child(paddle_pserver_client *inherited, const char *options) {
  const char *names[1] = {"w"};
  paddle_parameter dst;
  paddle_pserver_client *own;
  memset(&dst, 0, sizeof dst);
  REFUSED(paddle_get_params(inherited, names, &dst, 1), "before a fork");
  REFUSED(paddle_leave(inherited), "before a fork");
  paddle_pserver_client_release(inherited);
  own = paddle_new_pserver_client_with(options);
  CHECK(own != NULL && own != inherited);
  CHECK(fetch(own) == 3.0f);
  paddle_pserver_client_release(own);
}

int main(int argc, char **argv) {
  float three = 3.0f;
  paddle_parameter w;
  paddle_pserver_client *client;
  pid_t process;
  int status;
  CHECK(argc == 2);
  w.name = (char *)"w";
  w.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  w.content = &three;
  w.content_len = (int)sizeof three;
  client = paddle_new_pserver_client();
  CHECK(client != NULL);
  CHECK(paddle_begin_init_params(client, NULL) == 1);
  CHECK(paddle_init_param(client, w, NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  process = fork();
  CHECK(process >= 0);
  if (process == 0) {
    child(client, argv[1]);
    /* The parent's threads are not here, so valgrind would call what only they held lost: another program ends it. */
    execl("/bin/true", "true", (char *)NULL);
    return 1;
  }
  CHECK(waitpid(process, &status, 0) == process);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(fetch(client) == 3.0f);
  CHECK(paddle_leave(client) == 0);
  paddle_pserver_client_release(client);
  return 0;
}
