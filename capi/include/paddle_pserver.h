/**
 * @file paddle_pserver.h
 * @brief The client library of the parameter server.
 *
 * One library serves several editions of this interface. Edition 3 is the default. For another one, say
 *
 *     #define PADDLE_PSERVER_EDITION 2
 *
 * before this header is included: 2 has a learning rate with the gradients and paddle_set_params; 1 has one
 * parameter per call. Where editions differ under one name, the name is mapped to another symbol. The edition that
 * Paddle shipped, with numbers for clients, is in libpaddle_pserver_cclient.h.
 *
 * Errors: a function that returns int gives -1 when it fails, one that returns a pointer gives NULL, and
 * paddle_last_error() says why. Outputs are set only when a call succeeds. Any call ends within the client's deadline
 * (120 s unless the options or PSERVER_DEADLINE say otherwise), saving within ten of them.
 *
 * Memory: the caller owns everything it passes, and the library does not use it after the call; that of a call which
 * is started alone it uses until paddle_wait. What the library allocates is freed by paddle_parameter_release or
 * paddle_free; what a view shows stays until paddle_view_release.
 *
 * Threads: any function may be called from any thread at any time; calls on one client take turns. After a fork the
 * child makes a client of its own: calls with one of before give -1.
 *
 * Lengths are in bytes, and content is in the byte order of this machine. docs/CAPI.md has the rest.
 *
 * Made from capi/src/api by capi/tests/header.rs; changes belong there.
 */
#ifndef PADDLE_PSERVER_H
#define PADDLE_PSERVER_H

#ifndef PADDLE_PSERVER_EDITION
#define PADDLE_PSERVER_EDITION 3
#endif

#if PADDLE_PSERVER_EDITION != 1 && PADDLE_PSERVER_EDITION != 2 && PADDLE_PSERVER_EDITION != 3
#error "PADDLE_PSERVER_EDITION is 1, 2 or 3; for Paddle's own interface include libpaddle_pserver_cclient.h"
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if PADDLE_PSERVER_EDITION == 3
/** @brief The type of a tensor's elements. The halves are for gradients and fetched float32 values. */
typedef enum {
  PADDLE_ELEMENT_TYPE_INT32 = 0,
  PADDLE_ELEMENT_TYPE_UINT32 = 1,
  PADDLE_ELEMENT_TYPE_INT64 = 2,
  PADDLE_ELEMENT_TYPE_UINT64 = 3,
  PADDLE_ELEMENT_TYPE_FLOAT32 = 4,
  PADDLE_ELEMENT_TYPE_FLOAT64 = 5,
  PADDLE_ELEMENT_TYPE_FLOAT16 = 6,
  PADDLE_ELEMENT_TYPE_BFLOAT16 = 7
} paddle_element_type;
#else
/** @brief The type of a tensor's elements. The halves are for gradients and fetched float32 values. */
#define PADDLE_ELEMENT_TYPE_INT32 0
#define PADDLE_ELEMENT_TYPE_UINT32 1
#define PADDLE_ELEMENT_TYPE_INT64 2
#define PADDLE_ELEMENT_TYPE_UINT64 3
#define PADDLE_ELEMENT_TYPE_FLOAT32 4
#define PADDLE_ELEMENT_TYPE_FLOAT64 5
#define PADDLE_ELEMENT_TYPE_FLOAT16 6
#define PADDLE_ELEMENT_TYPE_BFLOAT16 7
typedef int paddle_element_type;
#endif

/**
 * A call that was started; a program only ever holds pointers to it.
 */
typedef struct paddle_call paddle_call;

/**
 * One connection to the parameter servers; a program only ever holds pointers to it.
 */
typedef struct paddle_pserver_client paddle_pserver_client;

/**
 * A program that is loaded; a C program only ever holds pointers to it.
 */
typedef struct paddle_program paddle_program;

/**
 * Parameters that are read where they are; a program only ever holds pointers to it.
 */
typedef struct paddle_view paddle_view;

/**
 * One named tensor, or the gradient of one.
 */
typedef struct paddle_parameter {
  /**
   * 1 to 1024 bytes of UTF-8 without control characters, then a NUL.
   */
  char *name;
  /**
   * The type of the elements.
   */
  paddle_element_type element_type;
  /**
   * The elements, in the byte order of this machine.
   */
  void *content;
  /**
   * The length of content in bytes.
   */
  int content_len;
} paddle_parameter;

/**
 * A gradient looks like its parameter.
 */
typedef struct paddle_parameter paddle_gradient;

/**
 * Some rows of a sparse parameter, or of its gradient.
 */
typedef struct paddle_rows {
  /**
   * The parameter's name.
   */
  char *name;
  /**
   * The type of the elements.
   */
  paddle_element_type element_type;
  /**
   * Which rows.
   */
  const uint64_t *ids;
  /**
   * How many ids there are.
   */
  int ids_len;
  /**
   * A row for each id, in their order.
   */
  void *content;
  /**
   * The length of content in bytes.
   */
  int content_len;
} paddle_rows;

/**
 * A tensor of the caller, or rows of a sparse parameter, with lengths of 64 bits: a value, a gradient, a place, or a
 * part of an optimizer's state.
 */
typedef struct paddle_tensor {
  /**
   * 1 to 1024 bytes of UTF-8 without control characters, then a NUL.
   */
  const char *name;
  /**
   * The type of the elements.
   */
  paddle_element_type element_type;
  /**
   * The elements, in the byte order of this machine: of rows, a row for each id, in their order.
   */
  void *content;
  /**
   * The length of content in bytes.
   */
  size_t content_len;
  /**
   * Which rows of a sparse parameter; NULL for a tensor that is whole.
   */
  const uint64_t *ids;
  /**
   * How many ids there are.
   */
  size_t ids_len;
} paddle_tensor;

/**
 * A parameter of the job, as paddle_list_params tells of it.
 */
typedef struct paddle_listed_parameter {
  /**
   * Its name.
   */
  const char *name;
  /**
   * The type of its elements.
   */
  paddle_element_type element_type;
  /**
   * 1 if it is a table that is sent and fetched by rows, 0 if it is dense.
   */
  int is_sparse;
  /**
   * Its length in bytes: of a table, that of all rows that may come to be.
   */
  uint64_t content_len;
  /**
   * Its dimensions in elements, the slowest first. The first of a table whose ids have no height is 0.
   */
  const uint64_t *shape;
  /**
   * How many dimensions there are.
   */
  size_t dimensions;
  /**
   * How many updates it has: the most that a part of it has.
   */
  uint64_t version;
} paddle_listed_parameter;

/**
 * A change of a table's learning rate.
 */
typedef struct paddle_rate_change {
  /**
   * The first update that has it, from 1.
   */
  uint64_t update;
  /**
   * The learning rate; negative for the configured one.
   */
  double learning_rate;
} paddle_rate_change;

/**
 * The optimizer's state of a dense parameter, or of some rows of a table.
 */
typedef struct paddle_state {
  /**
   * The tensors that its optimizer keeps, each with its name in the update rule, and in the parameter's type. Of
   * rows each has the same ids, and a row for each.
   */
  const struct paddle_tensor *tensors;
  /**
   * How many tensors there are: 0 where the optimizer keeps none.
   */
  size_t tensors_len;
  /**
   * The updates that the parameter has seen: the learning rate's schedule, and Adam's correction of its means, go on
   * from there.
   */
  uint64_t updates;
  /**
   * The learning rates that came with gradients of a table, where rows that have missed updates need them.
   */
  const struct paddle_rate_change *rates;
  /**
   * How many there are.
   */
  size_t rates_len;
} paddle_state;

/**
 * @brief The call has a fault: made again, it fails again.
 */
#define PADDLE_ERROR_REFUSED 1

/**
 * @brief The parameters are not initialised.
 */
#define PADDLE_ERROR_NOT_INITIALISED 2

/**
 * @brief The call reached its deadline.
 */
#define PADDLE_ERROR_TIMEOUT 3

/**
 * @brief The servers gave up waiting for trainers, which paddle_last_error names.
 */
#define PADDLE_ERROR_MISSING_TRAINERS 4

/**
 * @brief A server is gone.
 */
#define PADDLE_ERROR_SERVER_LOST 5

/**
 * @brief The program cancelled the call.
 */
#define PADDLE_ERROR_CANCELLED 6

/**
 * @brief A bug in this library, to be reported.
 */
#define PADDLE_ERROR_INTERNAL 7

/**
 * @brief Makes a client of the parameter servers. It finds server 0 and its own rank by the environment
 * (docs/CAPI.md says in which order), and connects with its first call.
 *
 * @return the client, which paddle_pserver_client_release releases; NULL when a setting is wrong.
 */
paddle_pserver_client *paddle_new_pserver_client(void);

/**
 * @brief Makes a client with options that win over the environment.
 *
 * @param options name=value pairs with spaces between: coordinator=tcp://host:port (server 0), trainer=3 (the
 * rank), deadline=30s (of each call; ms, s, m or h), reader=yes (only fetches). NULL gives none.
 * @return the client, which paddle_pserver_client_release releases; NULL when a setting is wrong.
 */
paddle_pserver_client *paddle_new_pserver_client_with(const char *options);

/**
 * @brief Releases a client: closes its connections once no call of another thread uses them.
 *
 * It does not wait, and does not leave the job: the servers go on waiting for this trainer's gradients until
 * another process takes its rank. A trainer that is finished calls paddle_leave first. NULL is nothing to release.
 * With a pointer that is no client the call changes only paddle_last_error.
 */
void paddle_pserver_client_release(paddle_pserver_client *client);

/**
 * @brief Ends every call of this client that is under way in any thread, also those that were started alone: each
 * returns -1 (a started one from paddle_wait) within 100 ms, and paddle_last_error says that it was cancelled.
 *
 * It may be called from a signal handler and from any thread. It returns at once and does not wait for the calls to
 * end. A cancelled call ends like one whose deadline has passed: its memory is the caller's again, and the call may be
 * repeated, because no gradient is applied twice. A call that begins after this one has begun is not affected.
 *
 * @return 0; -1 when there is no such client, and paddle_last_error is as it was.
 */
int paddle_cancel(paddle_pserver_client *client);

/**
 * @brief Saves all parameters as one model, on the machine of server 0. In mode sync it is of the step that the
 * calling trainer sent last, and a reader saves one only when no trainer is connected; in other modes its parts may be
 * of different updates.
 *
 * @param path where, below the server's model directory.
 * @return 0 if successful, otherwise -1. A model that is there already is replaced only by a whole one.
 */
int paddle_save_model(paddle_pserver_client *client,
                      const char *path);

/**
 * @brief Replaces the values of parameters by those of a safetensors file, such as a saved model, in a job that runs.
 * Other parameters stay, and so do the optimizers' states. The other trainers should wait meanwhile.
 *
 * @param path a file on this machine. Every tensor has the name, type and shape of a parameter; of a table it is the
 * whole matrix, or its rows and ids as paddle_save_model writes them.
 * @return 0 if successful, otherwise -1. Everything is checked before any value is replaced; a call that failed for
 * another reason than PADDLE_ERROR_REFUSED may be made again.
 */
int paddle_load_model(paddle_pserver_client *client,
                      const char *path);

/**
 * @brief Takes a checkpoint of all parameters now, and returns when it is on the disks of all servers. Training may go
 * on meanwhile.
 *
 * @param version becomes the fewest updates that a part of a parameter had when the checkpoint began; or NULL.
 * @return 0 if successful, otherwise -1: also when a server has no checkpoint directory.
 */
int paddle_checkpoint(paddle_pserver_client *client,
                      uint64_t *version);

/**
 * @brief Tells the servers that this trainer is finished, so that the others do not wait for it any more.
 *
 * @return 0 if successful, otherwise -1.
 */
int paddle_leave(paddle_pserver_client *client);

/**
 * @brief Finds the step at which a new process of a trainer continues, in mode sync: the smallest number of updates
 * over the parameters that get a gradient in each step. A new job has 0. A parameter more than two updates behind the
 * others, such as one that is never sent, is left out.
 *
 * A trainer calls this after the initialisation and before its first gradient, and begins its loop there. Its next
 * gradients are those of that step; where the earlier process had sent one, the servers acknowledge the new one and do
 * not apply it. A step count that the program keeps elsewhere, also in a parameter, may be one step off.
 *
 * @param rounds becomes the number of the step, from 0.
 * @return 0 if successful, otherwise -1: also in other modes, which have no common steps.
 */
int paddle_resume_rounds(paddle_pserver_client *client,
                         uint64_t *rounds);

/**
 * @brief This trainer's rank, from 0. It joins the job if no call has done so yet.
 *
 * @return the rank, or -1.
 */
int paddle_trainer_id(paddle_pserver_client *client);

/**
 * @brief The number of trainers of the job. It joins the job if no call has done so yet.
 *
 * @return the number, or -1.
 */
int paddle_trainers(paddle_pserver_client *client);

/**
 * @brief The number of servers of the job. It joins the job if no call has done so yet.
 *
 * @return the number, or -1.
 */
int paddle_servers(paddle_pserver_client *client);

/**
 * @brief Frees memory that this library allocated for its caller. NULL is nothing to free.
 *
 * Freeing anything else, or twice, changes only paddle_last_error.
 */
void paddle_free(void *memory);

/**
 * @brief The error of this thread's last failing call: the argument, the value found, the value expected.
 *
 * @return the text, which ends with a NUL and is the library's; empty if no call of this thread has failed. It
 * stays as it is until the thread's next failing call, or its end.
 */
const char *paddle_last_error(void);

/**
 * @brief The error of this thread's last failing call as a number, for programs.
 *
 * @return one of PADDLE_ERROR_...; 0 if no call of this thread has failed.
 */
int paddle_last_error_code(void);

/**
 * @brief What a returned status means in general. paddle_last_error says what happened.
 *
 * @return a text that ends with a NUL and lives as long as the library.
 */
const char *paddle_strerror(int status);

/**
 * @brief The library's version, such as "0.1.0".
 *
 * @return a text that ends with a NUL and lives as long as the library.
 */
const char *paddle_version(void);

/**
 * @brief Declares a sparse parameter: a table of rows that is sent and fetched by rows, with paddle_send_rows and
 * paddle_get_rows. A row is there once somebody has sent a gradient for it; before that it reads as it was declared to
 * begin. It is part of the initialisation, as paddle_init_param is, which declares one with a whole matrix of content.
 *
 * @param name its name.
 * @param element_type the type of its elements.
 * @param param_config_proto its optimizer and the form of its rows: "sparse { height: 1000000 width: 64 uniform {
 * low: -0.1 high: 0.1 } }" with ids below height, or "sparse { width: 64 rows: 1000000 }" with any ids, and at most so
 * many rows.
 * @return 0 if successful, otherwise -1.
 */
int paddle_init_rows(paddle_pserver_client *client,
                     const char *name,
                     paddle_element_type element_type,
                     const char *param_config_proto);

/**
 * @brief Sends rows of gradients (or of differences, where the job optimises on the client). Rows may repeat, and are
 * summed. It returns when every server has them for good. In sync mode this trainer takes part in the round of all
 * rows of these parameters: one that has none to send passes ids_len 0. A call that failed may be repeated: no
 * gradient is applied twice.
 *
 * @param grads the rows, of each parameter in one entry.
 * @param len the number of entries, at least 1.
 * @return 0 if successful, otherwise -1: also when more rows would come to be than were declared.
 */
int paddle_send_rows(paddle_pserver_client *client,
                     const paddle_rows *grads,
                     int len);

/**
 * @brief Fetches rows by their ids, which may repeat. In sync mode they have every gradient in them that this trainer
 * has sent, and so those of all trainers' same steps. Nothing is sent for rows that are not asked for.
 *
 * @param dst the rows: name, element_type, ids and ids_len say which, and content is the caller's place for exactly
 * content_len bytes, row after row in the order of the ids. Only what lies at content is written to.
 * @param len the number of entries, at least 1.
 * @return 0 if successful, otherwise -1, and then nothing is written.
 */
int paddle_get_rows(paddle_pserver_client *client,
                    const paddle_rows *dst,
                    int len);

/**
 * @brief Loads a program (docs/PROGRAMS.md), adds its gradients and its optimizer, divides it among the trainers and
 * the servers of the client's job in mode sync, and initialises the parameters if no other trainer does. Every trainer
 * of the job loads the same program with the same arguments.
 *
 * @param program the text, or without a brace in it the path of a file with the text, or with protobuf.
 * @param loss the name of the loss, a scalar; NULL means "loss".
 * @param config the optimizer, in the text forms of paddle_begin_init_params; NULL for a program that has its own.
 * @param batch rows of a step of all trainers together, at least 1: by them the placement on servers is estimated.
 * @return the program, which paddle_program_release frees, or the release of the client; otherwise NULL.
 */
paddle_program *paddle_program_load(paddle_pserver_client *client,
                                    const char *program,
                                    const char *loss,
                                    const char *config,
                                    int batch);

/**
 * @brief The number of steps that the job had when the program was loaded: 0 for a new job. A trainer that takes the
 * place of a killed one goes on with the step after them.
 *
 * @return the number, otherwise -1.
 */
int64_t paddle_program_steps_before(const paddle_program *program);

/**
 * @brief Sets data for the next step. Data that is not set again keeps its value.
 *
 * @param data of each its name, its type, which is the declared one, and its content in host memory: whole rows of
 * this trainer's part of the batch, without ids. The caller's memory is not used after the call.
 * @param len how many, at least 1.
 * @return 0 if successful, otherwise -1, and then nothing is set: also when the last step has failed and is to be
 * repeated.
 */
int paddle_program_feed(paddle_program *program,
                        const paddle_tensor *data,
                        size_t len);

/**
 * @brief One step: receives the parameters, computes the loss and the gradients of the data, and sends the gradients.
 * It returns when the servers have them; in mode sync they wait for every trainer's.
 *
 * @return 0 if successful, otherwise -1. The same step may then be made again: no gradient is applied twice.
 */
int paddle_program_step(paddle_program *program);

/**
 * @brief Reads a scalar of the last step, such as the loss, on this trainer's part of the batch.
 *
 * @param value becomes the scalar.
 * @return 0 if successful, otherwise -1.
 */
int paddle_program_value(paddle_program *program, const char *name, double *value);

/**
 * @brief Fetches a parameter whole, as the servers have it after the last step, or another variable as this trainer
 * has computed it.
 *
 * @param dst its name and its place in host memory, without ids: element_type and content_len are exactly the
 * variable's, and nothing but the content is written. With content NULL the library allocates: on success
 * element_type, content and content_len are set, and paddle_free frees content.
 * @return 0 if successful, otherwise -1, and then nothing is written.
 */
int paddle_program_fetch(paddle_program *program,
                         paddle_tensor *dst);

/**
 * @brief Saves all parameters as one safetensors file of this machine, whole or not at all.
 *
 * @param path the file, which ends in .safetensors.
 * @return 0 if successful, otherwise -1.
 */
int paddle_program_save(paddle_program *program, const char *path);

/**
 * @brief Releases a program; the parameters stay on the servers. NULL is nothing to release.
 */
void paddle_program_release(paddle_program *program);

#if PADDLE_PSERVER_EDITION != 1

/**
 * @brief Begins to initialise the parameters on the servers. Every trainer calls it; one is chosen, the others wait
 * until the parameters are there and fetch them with paddle_get_params. When the chosen one dies, another is.
 *
 * @param pserver_config_proto how the servers optimise: protobuf's text format, such as "optimizer: SGD const_lr {
 * learning_rate: 0.1 }", or "base64:" and the binary form in base64. NULL means the servers' own settings.
 * @return 1 if this trainer is chosen, 0 if the parameters are initialised, otherwise -1.
 */
int paddle_begin_init_params(paddle_pserver_client *client,
                             const char *pserver_config_proto);

/**
 * @brief paddle_begin_init_params with the configuration in protobuf's binary form.
 *
 * @param config the bytes; they may hold zeros. Not read when config_len is 0.
 * @param config_len their number, at most 65536.
 * @return as paddle_begin_init_params.
 */
int paddle_begin_init_params_n(paddle_pserver_client *client, const void *config, size_t config_len);

/**
 * @brief Tells the servers that every parameter is declared: the other trainers may go on.
 *
 * @return 0 if successful, otherwise -1: also when it was called before. After a failure the initialisation begins
 * again with paddle_begin_init_params, or the program ends and is started again.
 */
int paddle_finish_init_params(paddle_pserver_client *client);

/**
 * @brief Fetches parameters. In sync mode they have every gradient in them that this trainer has sent, and so those
 * of all trainers' same steps. In other modes, and for a reader in any mode, parts of a parameter may be of different
 * updates. It waits until the parameters are initialised.
 *
 * Of each dst[i] the caller sets content and content_len, the room at content in bytes. With content NULL the
 * library allocates, and paddle_parameter_release frees. On success it sets name (to names[i], the same pointer),
 * element_type, content_len (the parameter's length) and, if it was NULL, content. On failure it sets none of these;
 * what lies at content is then unspecified.
 *
 * A float32 parameter comes as halves where dst[i].element_type is PADDLE_ELEMENT_TYPE_FLOAT16 or
 * PADDLE_ELEMENT_TYPE_BFLOAT16 before the call and content has room for exactly half the parameter's bytes: each
 * element is rounded once, to the nearest, of two equally near to the even one; beyond the largest it is infinite, and
 * a NaN stays one. The server's value stays as it is. A half of a parameter of another type is refused.
 * Where content is NULL or has room for the whole, element_type is only replaced, whatever it was.
 *
 * @param names the names of the parameters, each once.
 * @param dst as many places.
 * @param len the length of both arrays.
 * @return 0 if successful, otherwise -1: also when a room is too small, two of them overlap, or a parameter is not had
 * as a half.
 */
int paddle_get_params(paddle_pserver_client *client,
                      const char **names,
                      paddle_parameter *dst,
                      int len);

/**
 * @brief Sends gradients and fetches the same parameters, with these gradients in them, in one round trip: in less
 * time than paddle_send_grads and paddle_get_params.
 *
 * @param grads the gradients.
 * @param dst a place for each gradient's parameter, as for paddle_get_params, also where it is to come as halves; its
 * name becomes the gradient's.
 * @param len the length of both arrays, at least 1.
 * @return 0 if successful, otherwise -1: also when memory of dst overlaps that of a gradient.
 */
int paddle_push_pull(paddle_pserver_client *client,
                     const paddle_gradient *grads,
                     paddle_parameter *dst,
                     int len);

/**
 * @brief Frees the content that the library allocated for a parameter, and sets content to NULL and content_len to
 * 0. The name stays the caller's. Content that is NULL is nothing to free.
 *
 * @return 0 if successful, otherwise -1: when the content was not allocated by this library.
 */
int paddle_parameter_release(paddle_parameter *param);

/**
 * @brief Starts paddle_push_pull and returns while it goes on. Calls about one parameter are carried out in the
 * order of their starts, others overlap; parameters that were declared earlier go first.
 *
 * The contents of grads and of dst are the library's until paddle_wait for this call, or the release of the client,
 * has returned: grads must stay as they are, and dst may not be touched. The arrays and the names are not used after
 * the start. Every dst[i].content is the caller's, not NULL. Of dst[i], name, element_type and content_len are set
 * now; the content is there after paddle_wait.
 *
 * @param grads the gradients, as for paddle_push_pull.
 * @param dst a place for each gradient's parameter, as for paddle_get_params, also where it is to come as halves.
 * @param len the length of both arrays, at least 1.
 * @param out becomes the call, which paddle_wait frees.
 * @return 0 if the call is on its way, otherwise -1, and then nothing is started.
 */
int paddle_push_pull_start(paddle_pserver_client *client,
                           const paddle_gradient *grads,
                           paddle_parameter *dst,
                           int len,
                           paddle_call **out);

/**
 * @brief Waits until a call that was started is over, and frees it, whether it failed or not. Its deadline counts
 * from the start.
 *
 * @return 0 if the call was successful, otherwise -1: also when it was waited for before, or when an earlier call
 * about one of its parameters failed. The same call may then be made again: no gradient is applied twice.
 */
int paddle_wait(paddle_call *call);

/**
 * @brief Says whether a call that was started is over, without waiting for it. paddle_wait is needed still.
 *
 * @param done becomes 1 if the call is over, well or not, otherwise 0.
 * @return 0 if successful, otherwise -1.
 */
int paddle_test(paddle_call *call, int *done);

/**
 * @brief paddle_init_param of a parameter of any length, with a shape. It may also be a sparse one, with a whole
 * matrix of content.
 *
 * @param value the parameter, without ids; the caller's memory is not used after the call.
 * @param shape the dimensions in elements, the slowest first; their product is the number of elements.
 * @param dimensions how many there are, at most 64; with 0 the parameter is a vector.
 * @param param_config_proto how this parameter is optimised; NULL means what paddle_begin_init_params was given.
 * @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
 * paddle_begin_init_params, or the program ends and is started again.
 */
int paddle_init_tensor(paddle_pserver_client *client,
                       const paddle_tensor *value,
                       const uint64_t *shape,
                       size_t dimensions,
                       const char *param_config_proto);

/**
 * @brief Sends gradients, fetches parameters, or both: tensors of any length, or rows of sparse parameters. A call
 * that failed may be repeated: no gradient is applied twice.
 *
 * With grads and dst it sends gradients and fetches the same parameters with these gradients in them, in one call;
 * the rows that it fetches may differ from the rows that it sends; mostly they are those of the next step. Everything
 * is checked before anything is sent.
 *
 * @param grads the gradients; NULL sends none. Each has its parameter's type, or float16 or bfloat16 for a parameter
 * of float32 or float64. Rows may repeat, and are summed; in sync mode a trainer without rows passes ids_len 0.
 * @param dst the places, of which only the contents are written to; NULL fetches nothing. With grads they are of the
 * same parameters in the same order. Each has its parameter's type and exactly its length, or float16 or bfloat16 and
 * half the length where the parameter is float32. Rows have their table's type.
 * @param len the length of grads and of dst, at least 1. They are all dense, or all sparse.
 * @param learning_rate used for these gradients instead of the configured one: finite, not negative. NULL leaves it.
 * @return 0 if successful, otherwise -1; then tensors of dst are unspecified, and rows as they were.
 */
int paddle_transfer(paddle_pserver_client *client,
                    const paddle_tensor *grads,
                    const paddle_tensor *dst,
                    size_t len,
                    const double *learning_rate);

/**
 * @brief Starts paddle_transfer and returns while it goes on. Calls about one parameter are carried out in the order
 * of their starts, others overlap; parameters that were declared earlier go first.
 *
 * The contents of grads and of dst are the library's until paddle_wait for this call, or the release of the client,
 * has returned: grads must stay as they are, and dst may not be touched. Rows that are sent are copied, so that their
 * contents are the caller's again after the start. The arrays, the names and the ids are not used after the start.
 *
 * @return the call, which paddle_wait frees; otherwise NULL, and then nothing is started.
 */
paddle_call *paddle_transfer_start(paddle_pserver_client *client,
                                   const paddle_tensor *grads,
                                   const paddle_tensor *dst,
                                   size_t len,
                                   const double *learning_rate);

/**
 * @brief Replaces values of dense parameters, and rows of tables, of any length. Other rows stay, and so do the
 * optimizers' states and counts of updates. The other trainers should wait meanwhile.
 *
 * @param values the parameters, each once; of rows each id once.
 * @param len their number, at least 1.
 * @return 0 if successful, otherwise -1. Everything is checked before any value is replaced; a call that failed for
 * another reason than PADDLE_ERROR_REFUSED may be made again.
 */
int paddle_set_tensors(paddle_pserver_client *client,
                       const paddle_tensor *values,
                       size_t len);

/**
 * @brief Lists the parameters of the job in the order of their declaration. It waits until they are initialised.
 *
 * @param params becomes an array, which paddle_free frees with all that it points to.
 * @param len becomes its length, which may be 0.
 * @return 0 if successful, otherwise -1. Versions are asked for one after the other, so they need not be of one
 * moment.
 */
int paddle_list_params(paddle_pserver_client *client,
                       paddle_listed_parameter **params,
                       size_t *len);

/**
 * @brief Lists the ids of a table's rows that somebody has sent a gradient for, ascending.
 *
 * @param ids becomes an array, which paddle_free frees.
 * @param len becomes its length, which may be 0.
 * @return 0 if successful, otherwise -1.
 */
int paddle_list_rows(paddle_pserver_client *client, const char *name, uint64_t **ids, size_t *len);

/**
 * @brief Fetches the optimizer's state of a dense parameter, or of rows, all of it after the same updates. In sync
 * mode it has every gradient in it that this trainer has sent. A table that is larger than the memory goes out by
 * parts of paddle_list_rows; parts with equal updates belong together.
 *
 * @param name the parameter's name.
 * @param ids which rows of a table; NULL for a dense parameter.
 * @param ids_len how many ids there are.
 * @return the state, which paddle_free frees with all that it points to. Otherwise NULL: also when other trainers'
 * gradients change it all the time.
 */
paddle_state *paddle_get_state(paddle_pserver_client *client,
                               const char *name,
                               const uint64_t *ids,
                               size_t ids_len);

/**
 * @brief Replaces the optimizer's state of a dense parameter, or of rows; values stay, and so do other rows. The
 * other trainers should wait meanwhile.
 *
 * @param name the parameter's name.
 * @param state the state: every tensor that the optimizer keeps, in any order.
 * @param is_last 1; or 0 for a part of a table's rows that others follow: with the last one the updates and the rates
 * are set.
 * @return 0 if successful, otherwise -1. A wrong state changes nothing; a call that failed for another reason than
 * PADDLE_ERROR_REFUSED may be made again.
 */
int paddle_set_state(paddle_pserver_client *client,
                     const char *name,
                     const paddle_state *state,
                     int is_last);

/**
 * @brief Allocates page-aligned, zeroed memory for gradients. A gradient in it at a multiple of 64 bytes that is sent
 * with paddle_push_pull, paddle_push_pull_start or paddle_transfer_view is read in place by servers of this machine
 * that are reached through shared memory. Everywhere else it is ordinary memory.
 *
 * One buffer is for many gradients: of those beyond some 900 a server that is sent from all of them is sent copies.
 *
 * It is the client's: a call of another client copies. A child of fork shares its pages, so only the parent writes.
 *
 * @param bytes how many, at least 1.
 * @return the memory, which paddle_buffer_free frees, or the release of the client; NULL when there is none.
 */
void *paddle_buffer_alloc(paddle_pserver_client *client,
                          size_t bytes);

/**
 * @brief Frees what paddle_buffer_alloc gave. NULL is nothing to free.
 *
 * It is refused while a call of this client is within it: one that another thread is inside, or one that was started
 * and not waited for, whether it reads from the buffer or writes to it. For a call of another client, or one that has
 * only just been entered, it is as with free(): the caller sees to it that none uses the memory.
 *
 * @return 0 if successful, otherwise -1: when such a call uses it, when it is no buffer of this client, or when it was
 * freed already.
 */
int paddle_buffer_free(paddle_pserver_client *client,
                       void *buffer);

/**
 * @brief Says that the caller will send from this memory, or fetch into it, again and again. Each transport uses that
 * as it can. Over verbs the network card reads gradients and writes values in place, without a copy; memory that the
 * card refuses (the limit of locked memory, pages that cannot be written) is copied, and so is memory that CUDA
 * manages. Over shared memory ordinary memory is still copied, since no other process can map it, and over TCP
 * nothing changes. So the call is always allowed.
 *
 * The memory stays, mapped as it is, until paddle_unregister_buffer, which is refused while a call uses it, or the
 * release of the client. If memory is freed earlier, the card still uses its pages, which are no longer the program's:
 * gradients are stale and values are lost without an error. The same holds for memory that the parent writes after a
 * fork where the kernel (before 5.12) or libibverbs (before 35) does not copy a card's pages for the child; there the
 * child may also be without pages that such memory begins and ends in.
 *
 * Memory of a CUDA device is recognised, if this process has loaded the driver, and from then on may stand wherever a
 * call takes a content: it is read before it is sent, and written after it was fetched, through as much pinned memory
 * of the host. Work queued on the device's default stream before the call is complete by then; the caller waits
 * for other streams. Such memory is in one call at a time. Without this call it is no content: reading it ends the
 * program.
 *
 * @param memory the caller's memory, which stays until paddle_unregister_buffer or the release of the client.
 * @param bytes how many, at least 1.
 * @return 0 if successful, otherwise -1: when some of it is registered already, or lies in a buffer; when it is
 * neither the host's nor a device's, or not all of it is; or when the host has no pages for that of a device.
 */
int paddle_register_buffer(paddle_pserver_client *client,
                           void *memory,
                           size_t bytes);

/**
 * @brief Says that memory of another device of this trainer is a replica of memory that paddle_register_buffer
 * registered. A gradient that is sent from that memory is then the sum of it and of its replicas, in the order in
 * which they were added, reckoned on its device: what the network moves and the servers add is one gradient, however
 * many devices the trainer has. Halves are summed in binary32 and rounded once. A value that is fetched into that
 * memory is written to all replicas too; a value that is sent (paddle_init_param) is the memory's own.
 *
 * The first sum takes 4 MiB of the first device for each replica, and 12 MiB more, 64 MiB at most, which all memory of
 * that device shares. Work queued on the devices' default streams before a call is complete by then, and no copy
 * of the call is in flight when it returns. Gradients of rows cannot be summed so: the ids are not given.
 *
 * @param memory where memory of a device begins that was registered.
 * @param replica memory of another device, as a rule, and as long. It stays until paddle_unregister_buffer(memory).
 * @param bytes how many.
 * @return 0 if successful, otherwise -1: when no memory of a device that begins there is registered, or a call uses it
 * that is not over; when the replica is not on a device, is not as long, or shares bytes with other memory that the
 * client knows; when it is the 64th.
 */
int paddle_register_replica(paddle_pserver_client *client,
                            void *memory,
                            void *replica,
                            size_t bytes);

/**
 * @brief Takes paddle_register_buffer back. Afterwards no network card reads or writes the memory, which may be freed.
 *
 * @return 0 if successful, otherwise -1: when no memory that begins there is registered; when a call uses it that is
 * not over, or not waited for; or when a card does not let go of it, and then it must stay until the program ends.
 */
int paddle_unregister_buffer(paddle_pserver_client *client,
                             void *memory);

/**
 * @brief Says how a content at an address gets to a server of this machine through shared memory.
 *
 * A buffer stops being read in place when a call failed while a server that was not reached any more may still have
 * read it: the caller may write it again at once, and it is copied from then on.
 *
 * @return 1 if it is read where it is, 0 if it is copied, -1 if this client does not know the address.
 */
int paddle_buffer_path(paddle_pserver_client *client,
                       const void *memory);

/**
 * @brief Fetches parameters without copying them, if the servers are reached through shared memory: the view has them
 * where the servers wrote them. Over TCP it is a copy, and everything else is the same.
 *
 * A view does not change, whatever others send meanwhile. In mode sync a trainer's view is of the step that it sent
 * last. In other modes, and a reader's in any mode, it may have pieces of different updates. As long as there is one
 * of a parameter, this client does not fetch that parameter again.
 *
 * @param names the names of the parameters, each once.
 * @param len how many, at least 1.
 * @param out becomes the view, which paddle_view_release frees, or the release of the client.
 * @return 0 if successful, otherwise -1: also when there is a view of one of the parameters.
 */
int paddle_get_params_view(paddle_pserver_client *client,
                           const char **names,
                           int len,
                           paddle_view **out);

/**
 * @brief paddle_get_params_view of values that come as halves: float32 parameters in half the bytes, rounded as
 * paddle_get_params does.
 *
 * @param element_types the type of each value: the parameter's own type, or PADDLE_ELEMENT_TYPE_FLOAT16 or
 * PADDLE_ELEMENT_TYPE_BFLOAT16 of a float32 parameter.
 * @return as paddle_get_params_view: -1 also when a parameter cannot come in its type.
 */
int paddle_get_params_view_as(paddle_pserver_client *client,
                              const char **names,
                              const paddle_element_type *element_types,
                              int len,
                              paddle_view **out);

/**
 * @brief Sends gradients of any length as paddle_transfer does, and fetches the same parameters, with these gradients
 * in them, as paddle_get_params_view does.
 *
 * @param grads the gradients of dense parameters, as for paddle_transfer.
 * @param element_types the type of each fetched value, as for paddle_get_params_view_as; NULL for the parameters' own
 * types.
 * @param len how many gradients, at least 1.
 * @param learning_rate as for paddle_transfer.
 * @return the view of the gradients' parameters, in the same order, which paddle_view_release frees, or the release of
 * the client; otherwise NULL: also when there is a view of one of the parameters.
 */
paddle_view *paddle_transfer_view(paddle_pserver_client *client,
                                  const paddle_tensor *grads,
                                  const paddle_element_type *element_types,
                                  size_t len,
                                  const double *learning_rate);

/**
 * @brief How many pieces a parameter of a view has: servers keep it in several. In order they are the parameter.
 *
 * @param index which parameter, from 0, in the order in which they were asked for.
 * @return the number of pieces, at least 1; otherwise -1.
 */
int paddle_view_pieces(const paddle_view *view,
                       int index);

/**
 * @brief Where a piece of a parameter is.
 *
 * @param index which parameter, from 0.
 * @param piece which of its pieces, from 0.
 * @param content becomes the address of its first element; it is read-only, and valid until the view is released.
 * @param bytes becomes its length.
 * @return 0 if successful, otherwise -1.
 */
int paddle_view_piece(const paddle_view *view,
                      int index,
                      int piece,
                      const void **content,
                      size_t *bytes);

/**
 * @brief Releases a view: the program reads none of its pieces any more. The servers get their memory back.
 *
 * @return 0 if successful, otherwise -1: when it was released already, and when the connection to a server ended while
 * the view was held, so that the values that were read of it may be of a later version. It is released in any case.
 */
int paddle_view_release(paddle_view *view);

#endif

#if PADDLE_PSERVER_EDITION == 3

/**
 * @brief Declares a parameter and sends its initial value, as a vector.
 *
 * @param param the parameter; the caller's memory is not used after the call.
 * @param param_config_proto the optimizer of this parameter, in the forms of paddle_begin_init_params; NULL means the
 * configuration that was given there.
 * @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
 * paddle_begin_init_params, or the program ends and is started again.
 */
int paddle_init_param(paddle_pserver_client *client,
                      paddle_parameter params,
                      const char *param_config_proto);

/**
 * @brief paddle_init_param with the configuration in protobuf's binary form.
 *
 * @param config the bytes; they may hold zeros. Not read when config_len is 0.
 * @param config_len their number, at most 65536.
 * @return as paddle_init_param.
 */
int paddle_init_param_n(paddle_pserver_client *client,
                        paddle_parameter params,
                        const void *config,
                        size_t config_len);

/**
 * @brief paddle_init_param with a shape, which a saved model then has.
 *
 * @param shape the dimensions in elements, the slowest first; their product is the number of elements.
 * @param dimensions how many there are, at most 64; with 0 the parameter is a vector.
 * @return as paddle_init_param.
 */
int paddle_init_param_shaped(paddle_pserver_client *client,
                             paddle_parameter params,
                             const uint64_t *shape,
                             int dimensions,
                             const char *param_config_proto);

/**
 * @brief Sends gradients (or differences, where the job optimises on the client) to the servers. It returns when
 * every server has them for good. A call that failed may be repeated: no gradient is applied twice.
 *
 * A gradient's type is its parameter's, or float16 or bfloat16 for a parameter of float32 or float64.
 *
 * @param grads the gradients, of each parameter at most one.
 * @param len their number, at least 1.
 * @return 0 if successful, otherwise -1.
 */
int paddle_send_grads(paddle_pserver_client *client,
                      const paddle_gradient *grads,
                      int len);

#elif PADDLE_PSERVER_EDITION == 2

#define paddle_init_param paddle_init_param_e2
#define paddle_send_grads paddle_send_grads_e2

/**
 * @brief Declares a parameter and sends its initial value, as a vector. It is optimised as
 * paddle_begin_init_params said.
 *
 * @param params the parameter; the caller's memory is not used after the call.
 * @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
 * paddle_begin_init_params, or the program ends and is started again.
 */
int paddle_init_param_e2(paddle_pserver_client *client,
                         paddle_parameter params);

/**
 * @brief Sends gradients to the servers. It returns when every server has them for good. A call that failed may be
 * repeated: no gradient is applied twice.
 *
 * A gradient's type is its parameter's, or float16 or bfloat16 for a parameter of float32 or float64.
 *
 * @param grads the gradients, of each parameter at most one.
 * @param total their number, at least 1.
 * @param learning_rate used for these gradients instead of the configured one; finite, not negative.
 * @return 0 if successful, otherwise -1.
 */
int paddle_send_grads_e2(paddle_pserver_client *client,
                         const paddle_gradient *grads,
                         int total,
                         double learning_rate);

/**
 * @brief Replaces parameters by the values given. Optimizers keep their state and their count of updates.
 *
 * @param params the parameters, each once.
 * @param total their number, at least 1.
 * @return 0 if successful, otherwise -1.
 */
int paddle_set_params(paddle_pserver_client *client, const paddle_parameter *params, int total);

#else

#define paddle_init_param paddle_init_param_e1

/**
 * @brief Says how long a parameter is, as no other call of this edition does. It is a matter of this client alone:
 * nothing is sent. The calls below that take content need it first; calling it again replaces the length.
 *
 * @param content_len the length of the parameter in bytes.
 * @return 0 if successful, otherwise -1.
 */
int paddle_declare_param(paddle_pserver_client *client,
                         const char *name,
                         int element_type,
                         int content_len);

/**
 * @brief Begins to initialise the parameters on the servers. Every trainer calls it; one is chosen, the others wait
 * until the parameters are there and fetch them with paddle_get_param. When the chosen one dies, another is.
 *
 * @return 1 if this trainer is chosen, 0 if the parameters are initialised, otherwise -1.
 */
int paddle_begin_init_param(paddle_pserver_client *client);

/**
 * @brief Sends the initial value of a parameter that paddle_declare_param has declared.
 *
 * @param content the elements; the caller's memory is not used after the call.
 * @return 0 if successful, otherwise -1. When the initialisation was taken from this trainer, it begins again with
 * paddle_begin_init_param, or the program ends and is started again.
 */
int paddle_init_param_e1(paddle_pserver_client *client,
                         const char *name,
                         int element_type,
                         const void *content);

/**
 * @brief Tells the servers that every parameter is declared: the other trainers may go on.
 *
 * @return 0 if successful, otherwise -1: also when it was called before.
 */
int paddle_finish_init_param(paddle_pserver_client *client);

/**
 * @brief Sends a gradient to the servers. It returns when every server has it for good. A call that failed may be
 * repeated: no gradient is applied twice.
 *
 * @param content the elements, as long as paddle_declare_param has said.
 * @return 0 if successful, otherwise -1.
 */
int paddle_send_grad(paddle_pserver_client *client,
                     const char *name,
                     int element_type,
                     const void *content);

/**
 * @brief Replaces a parameter by the value given. Its optimizer keeps its state and its count of updates.
 *
 * @param content the elements, as long as paddle_declare_param has said.
 * @return 0 if successful, otherwise -1.
 */
int paddle_set_param(paddle_pserver_client *client, const char *name, int element_type, const void *content);

/**
 * @brief Fetches a parameter into memory that the library allocates. It needs no paddle_declare_param.
 *
 * @param dst becomes the memory, which paddle_free frees.
 * @param dst_len becomes its length in bytes.
 * @return 0 if successful, otherwise -1; then neither is set.
 */
int paddle_get_param(paddle_pserver_client *client, const char *name, void **dst, int *dst_len);

#endif

#ifdef __cplusplus
}
#endif

#endif
