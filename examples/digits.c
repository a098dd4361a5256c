/* A trainer in C of a program in text: several processes teach a network to read handwritten digits.
 *
 * Start two servers and two trainers, each in a terminal of its own:
 *
 *     zcat cli/data/digits.csv.gz > digits.csv
 *     pserver serve --trainers 2 --servers 2
 *     pserver serve --trainers 2 --servers 2 --index 1 --coordinator tcp://127.0.0.1:7164 --bind tcp://127.0.0.1:0
 *     cc -Icapi/include examples/digits.c -Ltarget/release -lpaddle_pserver -o digits
 *     LD_LIBRARY_PATH=target/release ./digits docs/programs/mlp.program digits.csv 2 3 model.safetensors
 *     LD_LIBRARY_PATH=target/release ./digits docs/programs/mlp.program digits.csv 2 3 model.safetensors
 *
 * The arguments are the program, the data (64 pixels and the digit in a line), the number of trainers, how often they
 * see the data, and the file for the trained parameters.
 */
#include <paddle_pserver.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 64, PIXELS = 64, ROWS_MAX = 2000 };

static float pixels[ROWS_MAX][PIXELS];
static int64_t labels[ROWS_MAX];

/* Every call gives -1 when it fails, and paddle_last_error() says why. */
static void must(int status) {
  if (status < 0) {
    fprintf(stderr, "%s\n", paddle_last_error());
    exit(1);
  }
}

/* Reads the digits; a first line that does not begin with a number has the names of the columns. */
static int read_digits(const char *path) {
  static char line[4096];
  int rows = 0, pixel;
  FILE *file = fopen(path, "r");
  if (file == NULL) {
    perror(path);
    exit(1);
  }
  while (rows < ROWS_MAX && fgets(line, sizeof line, file) != NULL) {
    char *at = line;
    if (strchr("0123456789", line[0]) == NULL) {
      continue;
    }
    for (pixel = 0; pixel < PIXELS; pixel++) {
      pixels[rows][pixel] = strtof(at, &at);
      at += *at == ',';
    }
    labels[rows] = strtol(at, NULL, 10);
    rows += 1;
  }
  fclose(file);
  return rows;
}

static paddle_tensor data(const char *name, paddle_element_type type, void *content, size_t bytes) {
  paddle_tensor made;
  made.name = name;
  made.element_type = type;
  made.content = content;
  made.content_len = bytes;
  made.ids = NULL;
  made.ids_len = 0;
  return made;
}

int main(int count, char **arguments) {
  const char *optimizer = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";
  paddle_pserver_client *client;
  paddle_program *program;
  int trainers, trainer, epochs, epoch, rows, part, first;
  int64_t done;

  if (count != 6) {
    fprintf(stderr, "expected: digits PROGRAM DATA TRAINERS EPOCHS MODEL\n");
    return 2;
  }
  rows = read_digits(arguments[2]);
  trainers = atoi(arguments[3]);
  epochs = atoi(arguments[4]);
  if (trainers < 1 || BATCH % trainers != 0) {
    fprintf(stderr, "found %d trainers; expected a number that divides %d\n", trainers, BATCH);
    return 2;
  }
  client = paddle_new_pserver_client();
  if (client == NULL) {
    fprintf(stderr, "%s\n", paddle_last_error());
    return 1;
  }
  trainer = paddle_trainer_id(client);
  must(trainer);

  /* Every trainer loads the same program; one is chosen to initialise the parameters. */
  program = paddle_program_load(client, arguments[1], "loss", optimizer, BATCH);
  if (program == NULL) {
    fprintf(stderr, "%s\n", paddle_last_error());
    return 1;
  }
  done = paddle_program_steps_before(program);
  must(done < 0 ? -1 : 0);
  part = BATCH / trainers;
  for (epoch = 0; epoch < epochs; epoch++) {
    double loss = 0.0, accuracy = 0.0, value;
    int steps = 0;
    for (first = 0; first + BATCH <= rows; first += BATCH) {
      /* A process that was started again begins where the earlier one of its rank has ended. */
      if (done > 0) {
        done -= 1;
        continue;
      }
      /* This trainer's part of the batch. */
      int own = first + trainer * part;
      paddle_tensor fed[2];
      fed[0] = data("pixels", PADDLE_ELEMENT_TYPE_FLOAT32, pixels[own], part * sizeof pixels[0]);
      fed[1] = data("label", PADDLE_ELEMENT_TYPE_INT64, &labels[own], part * sizeof labels[0]);
      must(paddle_program_feed(program, fed, 2));
      must(paddle_program_step(program));
      must(paddle_program_value(program, "loss", &value));
      loss += value;
      must(paddle_program_value(program, "accuracy", &value));
      accuracy += value;
      steps += 1;
    }
    if (steps > 0) {
      printf("trainer %d, epoch %d: loss %.4f, accuracy %.4f\n", trainer, epoch + 1, loss / steps, accuracy / steps);
    }
  }
  if (trainer == 0) {
    must(paddle_program_save(program, arguments[5]));
  }
  paddle_program_release(program);

  /* The servers do not wait for a trainer that has left. */
  must(paddle_leave(client));
  paddle_pserver_client_release(client);
  return 0;
}
