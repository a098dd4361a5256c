/* A trainer in C with MPI: the processes of one mpirun teach a network of two layers to read handwritten digits. Ranks
 * are MPI's, gradients go through the parameter servers, and MPI adds up what each process finds in its part of the
 * held-out digits.
 *
 *     mpicc digits_mpi.c $(pkg-config --cflags --libs paddle_pserver) -lm -o digits_mpi
 *     mpirun -n 4 ./digits_mpi digits.csv
 *
 * The servers must expect as many trainers (pserver serve --trainers 4).
 */
#include <mpi.h>
#include <paddle_pserver.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIXELS = 64, HIDDEN = 32, CLASSES = 10, DIGITS_MAX = 2000, BATCH = 16, EPOCHS = 30, LAYERS = 4 };

struct digit {
  float pixels[PIXELS];
  int label;
};

/* The parameters, or their gradients. */
struct network {
  float weight1[PIXELS][HIDDEN], bias1[HIDDEN], weight2[HIDDEN][CLASSES], bias2[CLASSES];
};

static struct digit digits[DIGITS_MAX];

/* A trainer that fails ends the whole run. */
static void must(int holds, const char *text) {
  if (!holds) {
    fprintf(stderr, "%s\n", text);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

static int read_digits(const char *path) {
  static char line[4096];
  int count = 0, pixel;
  FILE *file = fopen(path, "r");
  must(file != NULL, "the file of the digits cannot be opened");
  while (count < DIGITS_MAX && fgets(line, sizeof line, file) != NULL) {
    char *at = line;
    for (pixel = 0; pixel < PIXELS; pixel++) {
      digits[count].pixels[pixel] = strtof(at, &at) / 16.0f;
      at += *at == ',';
    }
    digits[count++].label = (int)strtol(at, NULL, 10);
  }
  fclose(file);
  return count;
}

/* Every fifth digit is held out. */
static int is_held_out(int index) { return index % 5 == 4; }

/* Probabilities of the classes; hidden gets the outputs of the first layer. */
static void forward(const struct network *network, const float *pixels, float *hidden, float *classes) {
  int from, to;
  float sum = 0.0f, largest = -INFINITY;
  memcpy(hidden, network->bias1, sizeof network->bias1);
  for (from = 0; from < PIXELS; from++)
    for (to = 0; to < HIDDEN; to++) hidden[to] += pixels[from] * network->weight1[from][to];
  for (to = 0; to < HIDDEN; to++) hidden[to] = fmaxf(hidden[to], 0.0f);
  memcpy(classes, network->bias2, sizeof network->bias2);
  for (from = 0; from < HIDDEN; from++)
    for (to = 0; to < CLASSES; to++) classes[to] += hidden[from] * network->weight2[from][to];
  for (to = 0; to < CLASSES; to++) largest = fmaxf(largest, classes[to]);
  for (to = 0; to < CLASSES; to++) sum += classes[to] = expf(classes[to] - largest);
  for (to = 0; to < CLASSES; to++) classes[to] /= sum;
}

/* Adds one digit's part of the gradient of the mean loss of a batch. */
static void backward(const struct network *network, const struct digit *digit, struct network *gradient) {
  float hidden[HIDDEN], classes[CLASSES];
  int from, to;
  forward(network, digit->pixels, hidden, classes);
  classes[digit->label] -= 1.0f;
  for (to = 0; to < CLASSES; to++) gradient->bias2[to] += classes[to] / BATCH;
  for (from = 0; from < HIDDEN; from++) {
    float error = 0.0f;
    for (to = 0; to < CLASSES; to++) {
      gradient->weight2[from][to] += hidden[from] * classes[to] / BATCH;
      error += network->weight2[from][to] * classes[to];
    }
    if (hidden[from] == 0.0f) continue;
    gradient->bias1[from] += error / BATCH;
    for (to = 0; to < PIXELS; to++) gradient->weight1[to][from] += digit->pixels[to] * error / BATCH;
  }
}

static int is_right(const struct network *network, const struct digit *digit) {
  float hidden[HIDDEN], classes[CLASSES];
  int class, best = 0;
  forward(network, digit->pixels, hidden, classes);
  for (class = 1; class < CLASSES; class++)
    if (classes[class] > classes[best]) best = class;
  return best == digit->label;
}

static paddle_parameter layer(const char *name, float *content, size_t bytes) {
  paddle_parameter made = {(char *)name, PADDLE_ELEMENT_TYPE_FLOAT32, NULL, 0};
  made.content = content;
  made.content_len = (int)bytes;
  return made;
}

/* The arrays of a network, as the library has them. */
static void describe(struct network *network, paddle_parameter *layers) {
  layers[0] = layer("layer1/weight", network->weight1[0], sizeof network->weight1);
  layers[1] = layer("layer1/bias", network->bias1, sizeof network->bias1);
  layers[2] = layer("layer2/weight", network->weight2[0], sizeof network->weight2);
  layers[3] = layer("layer2/bias", network->bias2, sizeof network->bias2);
}

/* Small weights on both sides of zero, the same in every run. */
static void initialise(struct network *network) {
  float *numbers = network->weight1[0];
  unsigned state = 1, index;
  for (index = 0; index < sizeof *network / sizeof *numbers; index++) {
    state = state * 1664525u + 1013904223u;
    numbers[index] = ((float)(state >> 8) / (float)(1 << 24) - 0.5f) * 0.4f;
  }
}

static void train(paddle_pserver_client *client, struct network *network, int count, int rank, int size) {
  static struct network gradient;
  paddle_parameter layers[LAYERS], gradients[LAYERS];
  const char *names[LAYERS];
  int chosen, step, each, index = rank;
  uint64_t done;
  describe(network, layers);
  describe(&gradient, gradients);
  initialise(network);
  chosen = paddle_begin_init_params(client, "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }");
  must(chosen >= 0, paddle_last_error());
  if (chosen == 1) { /* this rank initialises; the others have waited for it */
    for (each = 0; each < LAYERS; each++)
      must(paddle_init_param(client, layers[each], NULL) == 0, paddle_last_error());
    must(paddle_finish_init_params(client) == 0, paddle_last_error());
  }
  for (each = 0; each < LAYERS; each++) names[each] = layers[each].name;
  /* 0, or where an earlier process of this rank has ended. */
  must(paddle_resume_rounds(client, &done) == 0, paddle_last_error());
  must(paddle_get_params(client, names, layers, LAYERS) == 0, paddle_last_error());
  /* Each rank takes every size-th digit, and all ranks make the same number of steps. */
  for (step = 0; step < EPOCHS * count / (BATCH * size); step++) {
    memset(&gradient, 0, sizeof gradient);
    for (each = 0; each < BATCH; each++) {
      do index = (index + size) % count;
      while (is_held_out(index));
      if ((uint64_t)step >= done) backward(network, &digits[index], &gradient);
    }
    if ((uint64_t)step < done) continue;
    must(paddle_push_pull(client, gradients, layers, LAYERS) == 0, paddle_last_error());
  }
}

int main(int argument_count, char **arguments) {
  static struct network network;
  paddle_pserver_client *client;
  char options[32];
  int rank, size, count, index, counts[2] = {0, 0}, sums[2];
  MPI_Init(&argument_count, &arguments);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  must(argument_count == 2, "expected: digits_mpi DATA");
  count = read_digits(arguments[1]);

  snprintf(options, sizeof options, "trainer=%d", rank);
  client = paddle_new_pserver_client_with(options);
  must(client != NULL, paddle_last_error());
  train(client, &network, count, rank, size);
  must(paddle_leave(client) == 0, paddle_last_error());
  paddle_pserver_client_release(client);

  for (index = 0; index < count; index++) {
    if (!is_held_out(index) || index / 5 % size != rank) continue;
    counts[0] += is_right(&network, &digits[index]);
    counts[1] += 1;
  }
  MPI_Reduce(counts, sums, 2, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) printf("accuracy %.1f %% on held-out digits\n", 100.0 * sums[0] / sums[1]);
  MPI_Finalize();
  return 0;
}
