/* A server is killed, "under" a call or "between" two: the program is told so by the call, and lives. Its arguments are
   the server's process and when. */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <limits.h>
#include <paddle_pserver.h>
#include <sched.h>
#include <signal.h>

#include "check.h"

enum { COUNT = 1 << 20 };

/* The letter by which Linux calls the state of a process or thread, 'X' where it is gone. */
static char state_of(const char *folder) {
  char path[PATH_MAX], state = 'X';
  FILE *file;
  snprintf(path, sizeof path, "%s/stat", folder);
  file = fopen(path, "r");
  if (file == NULL) return 'X';
  if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
  fclose(file);
  return state;
}

/* The process has ended; who started it may not have looked yet. */
static int is_dead(const char *process) {
  char folder[64];
  snprintf(folder, sizeof folder, "/proc/%s", process);
  return state_of(folder) == 'Z' || state_of(folder) == 'X';
}

/* Every thread has stopped: after SIGSTOP is sent, each of them works on until it has heard of it. */
static int is_stopped(const char *process) {
  char folder[64], thread[PATH_MAX];
  struct dirent *entry;
  int stopped = 1;
  DIR *threads;
  snprintf(folder, sizeof folder, "/proc/%s/task", process);
  threads = opendir(folder);
  CHECK(threads != NULL);
  while ((entry = readdir(threads)) != NULL) {
    if (entry->d_name[0] == '.') continue;
    snprintf(thread, sizeof thread, "%s/%s", folder, entry->d_name);
    if (state_of(thread) != 'T') stopped = 0;
  }
  closedir(threads);
  return stopped;
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
    while (!is_stopped(argv[1])) sched_yield();
    CHECK(paddle_push_pull_start(client, &all, &dst, 1, &call) == 0);
    CHECK(kill((pid_t)atol(argv[1]), SIGKILL) == 0);
    REFUSED(paddle_wait(call), "server");
    CHECK(paddle_last_error_code() == PADDLE_ERROR_TIMEOUT || paddle_last_error_code() == PADDLE_ERROR_SERVER_LOST);
  } else {
    CHECK(kill((pid_t)atol(argv[1]), SIGKILL) == 0);
    while (!is_dead(argv[1])) sched_yield();
    REFUSED(paddle_push_pull(client, &all, &dst, 1), "server");
  }
  puts("alive");
  paddle_pserver_client_release(client);
  free(content);
  free(fetched);
  return 0;
}
