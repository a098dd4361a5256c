/* A server is killed, "under" a call or "between" two: the program is told so by the call, and lives. Its arguments are
   the server's process and when. */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <paddle_pserver.h>
#include <sched.h>
#include <signal.h>

#include "check.h"

enum { COUNT = 1 << 20 };

/* Every thread of a process that is still there is in one of these states, letters of Linux. After a signal is sent,
   each works on until it has heard of it; and who started the process may not have looked yet. */
static int all_threads_are(const char *states, const char *process) {
  char path[512], state;
  struct dirent *thread;
  int all = 1;
  FILE *file;
  DIR *threads;
  snprintf(path, sizeof path, "/proc/%s/task", process);
  threads = opendir(path);
  if (threads == NULL) return 1;
  while ((thread = readdir(threads)) != NULL) {
    if (thread->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "/proc/%s/task/%s/stat", process, thread->d_name);
    file = fopen(path, "r");
    if (file == NULL) continue;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && strchr(states, state) == NULL) all = 0;
    fclose(file);
  }
  closedir(threads);
  return all;
}

int main(int argc, char **argv) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  float *content = calloc(COUNT, sizeof *content), *fetched = calloc(COUNT, sizeof *fetched);
  paddle_parameter all, dst;
  paddle_call *call = NULL;
  CHECK(argc == 3 && client != NULL && content != NULL && fetched != NULL);
  CHECK(signal(SIGPIPE, SIG_DFL) != SIG_ERR);
  all.name = (char *)"all";
  all.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  all.content = content;
  all.content_len = COUNT * (int)sizeof *content;
  dst = all;
  dst.content = fetched;
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }") == 1);
  CHECK(paddle_init_param(client, all, NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  CHECK(paddle_push_pull(client, &all, &dst, 1) == 0);
  if (strcmp(argv[2], "under") == 0) {
    /* It answers nothing more before it is killed. */
    CHECK(kill((pid_t)atol(argv[1]), SIGSTOP) == 0);
    while (!all_threads_are("T", argv[1])) sched_yield();
    CHECK(paddle_push_pull_start(client, &all, &dst, 1, &call) == 0);
    CHECK(kill((pid_t)atol(argv[1]), SIGKILL) == 0);
    REFUSED(paddle_wait(call), "server");
    CHECK(paddle_last_error_code() == PADDLE_ERROR_TIMEOUT || paddle_last_error_code() == PADDLE_ERROR_SERVER_LOST);
  } else {
    CHECK(kill((pid_t)atol(argv[1]), SIGKILL) == 0);
    while (!all_threads_are("ZX", argv[1])) sched_yield();
    REFUSED(paddle_push_pull(client, &all, &dst, 1), "server");
  }
  puts("alive");
  paddle_pserver_client_release(client);
  free(content);
  free(fetched);
  return 0;
}
