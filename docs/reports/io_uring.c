/* Whether io_uring makes a round of 4 KiB over TCP shorter than waiting and receiving does (decisions/sockets.md).
 *
 *   gcc -O2 -o io_uring docs/reports/io_uring.c -luring && ./io_uring
 *
 * A client that blocks sends 4 KiB and gets 4 KiB back from a server on another core, which waits in one way after the
 * other. The medians of 4,000 rounds, 15 times each, beside those of the server that blocks. */
#define _GNU_SOURCE
#include <liburing.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 4096, ROUNDS = 4000, WARM = 100, TIMES = 15, WAYS = 5 };
enum { RECEIVED = 1, SENT = 2, WOKEN = 3 };

static const char *names[WAYS] = {"recv, send", "epoll_wait, recv, send", "io_uring", "io_uring, deferred work",
                                  "io_uring, cooperative work"};
static char bytes[BYTES];

static void receive(int socket) {
  for (ssize_t had = 0, got; had < BYTES; had += got)
    if ((got = recv(socket, bytes + had, BYTES - had, 0)) <= 0) exit(0);
}

static void answer(int socket) {
  if (send(socket, bytes, BYTES, MSG_NOSIGNAL) != BYTES) exit(0);
}

/* As a shard waits: for its connections and for who wakes it. */
static void serve_epoll(int socket) {
  int epoll = epoll_create1(0), wake = eventfd(0, 0);
  struct epoll_event one = {EPOLLIN, {.fd = socket}}, other = {EPOLLIN, {.fd = wake}}, happened[8];
  epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &one);
  epoll_ctl(epoll, EPOLL_CTL_ADD, wake, &other);
  for (;; answer(socket)) {
    for (ssize_t had = 0, got; had < BYTES; had += got > 0 ? got : 0) {
      epoll_wait(epoll, happened, 8, 1000);
      if ((got = recv(socket, bytes + had, BYTES - had, MSG_DONTWAIT)) == 0) exit(0);
    }
  }
}

/* One call of the system for a round: the answer and the next receive go in, and what has come is waited for. */
static void serve_uring(int socket, unsigned flags) {
  struct io_uring ring;
  struct io_uring_params with = {.flags = flags};
  if (io_uring_queue_init_params(64, &ring, &with) != 0) exit(1);
  struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
  io_uring_prep_poll_add(entry, eventfd(0, 0), POLLIN);
  entry->user_data = WOKEN;
  entry = io_uring_get_sqe(&ring);
  io_uring_prep_recv(entry, socket, bytes, BYTES, 0);
  entry->user_data = RECEIVED;
  ssize_t had = 0;
  for (;;) {
    struct io_uring_cqe *done;
    unsigned head, count = 0, came = 0;
    io_uring_submit_and_wait(&ring, 1);
    io_uring_for_each_cqe(&ring, head, done) {
      count++;
      if (done->user_data != RECEIVED) continue;
      if (done->res <= 0) exit(0);
      had += done->res;
      came = 1;
    }
    io_uring_cq_advance(&ring, count);
    if (!came) continue;
    if (had == BYTES) {
      entry = io_uring_get_sqe(&ring);
      io_uring_prep_send(entry, socket, bytes, BYTES, MSG_NOSIGNAL | MSG_WAITALL);
      entry->user_data = SENT;
      had = 0;
    }
    entry = io_uring_get_sqe(&ring);
    io_uring_prep_recv(entry, socket, bytes + had, BYTES - had, 0);
    entry->user_data = RECEIVED;
  }
}

static void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

static int compare(const void *left, const void *right) {
  double difference = *(const double *)left - *(const double *)right;
  return (difference > 0) - (difference < 0);
}

static double median(double *numbers, int count) {
  qsort(numbers, count, sizeof *numbers, compare);
  return numbers[count / 2];
}

static void serve(int listener, int way) {
  int socket = accept(listener, NULL, NULL), on = 1;
  pin(1);
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  switch (way) {
  case 0:
    for (;; answer(socket)) receive(socket);
  case 1: serve_epoll(socket); break;
  case 2: serve_uring(socket, 0); break;
  case 3: serve_uring(socket, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN); break;
  case 4: serve_uring(socket, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN); break;
  }
}

static double microseconds(int way) {
  int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof at;
  if (bind(listener, (void *)&at, length) || listen(listener, 1)) exit(1);
  getsockname(listener, (void *)&at, &length);
  pid_t server = fork();
  if (server == 0) {
    serve(listener, way);
    exit(0);
  }
  pin(0);
  if (connect(client, (void *)&at, length)) exit(1);
  setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  static double took[ROUNDS];
  for (int round = -WARM; round < ROUNDS; round++) {
    double start = now();
    answer(client);
    receive(client);
    if (round >= 0) took[round] = now() - start;
  }
  close(client);
  close(listener);
  kill(server, SIGKILL);
  waitpid(server, NULL, 0);
  return median(took, ROUNDS);
}

int main(void) {
  static double all[WAYS][TIMES], ratios[WAYS][TIMES];
  for (int time = 0; time < TIMES; time++)
    for (int way = 0; way < WAYS; way++) all[way][time] = microseconds(way);
  for (int way = WAYS - 1; way >= 0; way--)
    for (int time = 0; time < TIMES; time++) ratios[way][time] = all[way][time] / all[0][time];
  for (int way = 0; way < WAYS; way++) {
    double ratio = median(ratios[way], TIMES);
    printf("%-28s %5.1f us, %.3f of the first (%.3f to %.3f)\n", names[way], median(all[way], TIMES), ratio,
           ratios[way][TIMES / 4], ratios[way][TIMES * 3 / 4]);
  }
  return 0;
}
