/* A trainer in C: several processes fit one line, y = 3 x - 1, through the parameter server.
 *
 * Start a server and two trainers, each in a terminal of its own (one trainer is fine, too, with --trainers 1):
 *
 *     pserver serve --trainers 2
 *     cc -Icapi/include examples/trainer.c -Ltarget/release -lpaddle_pserver -o trainer
 *     LD_LIBRARY_PATH=target/release ./trainer
 *     LD_LIBRARY_PATH=target/release ./trainer
 *
 * The argument is the number of steps. A trainer that ends in the middle may be started again: it goes on at its step.
 * Under mpirun or srun each trainer takes its rank from the launcher. PSERVER_COORDINATOR=tcp://host:7164 names a
 * server on another machine, and PSERVER_VERBOSE=1 shows which settings were found where.
 */
#include <paddle_pserver.h>

#include <stdio.h>
#include <stdlib.h>

enum { EXAMPLES = 64, STEPS = 200 };

/* Every call gives -1 when it fails, and paddle_last_error() says why. */
static void must(int status) {
  if (status < 0) {
    fprintf(stderr, "%s\n", paddle_last_error());
    exit(1);
  }
}

/* The model has one parameter of two numbers: the slope and the offset of the line. */
static paddle_parameter line(float *numbers) {
  paddle_parameter parameter;
  parameter.name = (char *)"line";
  parameter.element_type = PADDLE_ELEMENT_TYPE_FLOAT32;
  parameter.content = numbers;
  parameter.content_len = 2 * (int)sizeof *numbers;
  return parameter;
}

/* How the mean squared error changes with the slope and the offset. Each trainer sees examples of its own. */
static void differentiate(const float *numbers, int trainer, float *gradient) {
  int index;
  gradient[0] = gradient[1] = 0.0f;
  for (index = 0; index < EXAMPLES; index++) {
    float x = (float)((index * 7 + trainer * 3) % EXAMPLES) / (float)EXAMPLES - 0.5f;
    float y = 3.0f * x - 1.0f;
    float error = numbers[0] * x + numbers[1] - y;
    gradient[0] += 2.0f * error * x / (float)EXAMPLES;
    gradient[1] += 2.0f * error / (float)EXAMPLES;
  }
}

int main(int count, char **arguments) {
  float numbers[2] = {0.0f, 0.0f};
  float gradient[2];
  const char *names[1] = {"line"};
  paddle_parameter place = line(numbers);
  paddle_gradient sent = line(gradient);
  paddle_pserver_client *client;
  int chosen, trainer;
  uint64_t step, steps = count > 1 ? (uint64_t)atol(arguments[1]) : STEPS;

  /* The client finds the servers by the environment; without any setting, on this machine. */
  client = paddle_new_pserver_client();
  if (client == NULL) {
    fprintf(stderr, "%s\n", paddle_last_error());
    return 1;
  }
  trainer = paddle_trainer_id(client);
  must(trainer);

  /* One trainer is chosen to say where the parameters start and how they are optimised; the others wait here. */
  chosen = paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.5 }");
  must(chosen);
  if (chosen == 1) {
    must(paddle_init_param(client, line(numbers), NULL));
    must(paddle_finish_init_params(client));
  }

  /* All trainers begin with the same parameters, and at step 0; but a process that was started again begins where the
     earlier one of its rank has ended. */
  must(paddle_resume_rounds(client, &step));
  must(paddle_get_params(client, names, &place, 1));
  for (; step < steps; step++) {
    differentiate(numbers, trainer, gradient);
    /* The servers average the gradients of all trainers, take one step, and send the new parameters back. */
    must(paddle_push_pull(client, &sent, &place, 1));
  }
  printf("trainer %d: y = %.3f x + %.3f\n", trainer, (double)numbers[0], (double)numbers[1]);

  /* The servers do not wait for a trainer that has left. */
  must(paddle_leave(client));
  paddle_pserver_client_release(client);
  return 0;
}
