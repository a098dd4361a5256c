/* What the test programs share: a check that names the place and the reason, and stops. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                    \
  do {                                                                                                      \
    if (!(condition)) {                                                                                     \
      fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, paddle_last_error()); \
      exit(1);                                                                                              \
    }                                                                                                       \
  } while (0)

/* A call that must fail with -1, and whose text must contain some words. */
#define REFUSED(call, words)                                                                                \
  do {                                                                                                      \
    CHECK((call) == -1);                                                                                    \
    if (strstr(paddle_last_error(), words) == NULL) {                                                       \
      fprintf(stderr, "%s:%d: %s\n  said: %s\n  expected: %s\n", __FILE__, __LINE__, #call,                 \
              paddle_last_error(), words);                                                                  \
      exit(1);                                                                                              \
    }                                                                                                       \
  } while (0)

#endif
