/**
 * @file libpaddle_pserver_cclient.h
 * @brief The client library of the parameter server, as Paddle shipped it: programs for Paddle's library compile with
 * this header and link with libpaddle_pserver.
 *
 * The names are mapped to symbols that end in _go, so this header and paddle_pserver.h do not go into one source file.
 *
 * Errors: -1 (PSERVER_ERROR), and paddle_last_error() says why; no call ends the program. Outputs are set only when a
 * call succeeds. Memory: the caller owns all of it, and the library does not use it after a call. Threads: any
 * function may be called from any thread at any time. Lengths are in bytes. docs/CAPI.md has the rest.
 *
 * Made from capi/src/api by capi/tests/header.rs; changes belong there.
 */
#ifndef LIBPADDLE_PSERVER_CCLIENT_H
#define LIBPADDLE_PSERVER_CCLIENT_H

#ifdef PADDLE_PSERVER_H
#error "libpaddle_pserver_cclient.h and paddle_pserver.h are editions of one interface; include one of them"
#endif
/* Keeps paddle_pserver.h out of the same source file. */
#define PADDLE_PSERVER_EDITION 0

#define PSERVER_ERROR -1
#define PSERVER_OK 0

#define paddle_new_pserver_client paddle_new_pserver_client_go
#define paddle_pserver_client_release paddle_pserver_client_release_go
#define paddle_begin_init_params paddle_begin_init_params_go
#define paddle_init_param paddle_init_param_go
#define paddle_finish_init_params paddle_finish_init_params_go
#define paddle_send_grads paddle_send_grads_go
#define paddle_get_params paddle_get_params_go
#define paddle_save_model paddle_save_model_go
#define paddle_cancel paddle_cancel_go

#ifdef __cplusplus
extern "C" {
#endif

/** @brief The type of a tensor's elements. The halves are for gradients only. */
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

/**
 * A client's number, from 0.
 */
typedef int paddle_pserver_client;

/**
 * Go's int in C.
 */
typedef long long GoInt;

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
  unsigned char *content;
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
 * @brief Makes a client of the parameter servers. Settings that addrs leaves out come from the environment
 * (docs/CAPI.md).
 *
 * @param addrs "host:port,host:port"; the first is server 0, which knows the others.
 * @param selected whether this client offers to initialise the parameters; the servers choose one of those.
 * @return the client, from 0; -1 when the addresses or a setting are wrong.
 */
paddle_pserver_client paddle_new_pserver_client_go(char *addrs, GoInt selected);

/**
 * @brief Not there yet: servers are not found through etcd.
 *
 * @return -1.
 */
paddle_pserver_client paddle_new_etcd_pserver_client(char *etcd_endpoints);

/**
 * @brief Releases a client: closes its connections once no call of another thread uses them. With a number that is no
 * client's the call changes only paddle_last_error.
 */
void paddle_pserver_client_release_go(paddle_pserver_client client);

/**
 * @brief Begins to initialise the parameters on the servers. A client made with selected 0 gets 0 at once; of the
 * others one is chosen, and the rest wait until the parameters are there. paddle_get_params waits for them, too.
 *
 * @return 1 if this trainer is chosen, 0 if not, PSERVER_ERROR on failure.
 */
int paddle_begin_init_params_go(paddle_pserver_client client);

/**
 * @brief Declares a parameter and sends its initial value.
 *
 * @param param the parameter; the caller's memory is not used after the call.
 * @param param_config an OptimizerConfig in protobuf's binary form. Zeros after the last field are ignored.
 * @param config_len its length in bytes, at most 65536; 0 means the servers' own settings.
 * @return PSERVER_OK or PSERVER_ERROR.
 */
int paddle_init_param_go(paddle_pserver_client client,
                         struct paddle_parameter param,
                         void *param_config,
                         int config_len);

/**
 * @brief Tells the servers that every parameter is declared: the other trainers may go on.
 *
 * @return PSERVER_OK or PSERVER_ERROR.
 */
int paddle_finish_init_params_go(paddle_pserver_client client);

/**
 * @brief Sends gradients to the servers. It returns when every server has them for good.
 *
 * @param grads pointers to the gradients, of each parameter at most one.
 * @param total their number, at least 1.
 * @return PSERVER_OK or PSERVER_ERROR.
 */
int paddle_send_grads_go(paddle_pserver_client client, paddle_gradient **grads, int total);

/**
 * @brief Fetches parameters into the caller's memory. It waits until the parameters are initialised.
 *
 * @param dst pointers to parameters of which name, content and content_len are set; content_len is the parameter's
 * length. On success element_type is set.
 * @param total their number.
 * @return PSERVER_OK or PSERVER_ERROR.
 */
int paddle_get_params_go(paddle_pserver_client client,
                         struct paddle_parameter **dst,
                         int total);

/**
 * @brief Ends every call of this client that is under way in any thread: each returns -1 within 100 ms, and
 * paddle_last_error says that it was cancelled. It may be called from a signal handler and from any thread, and
 * returns at once. A cancelled call may be made again; one that begins later is not affected.
 *
 * @return PSERVER_OK; PSERVER_ERROR when there is no such client, and paddle_last_error is as it was.
 */
int paddle_cancel_go(paddle_pserver_client client);

/**
 * @brief Saves all parameters as one model, on the machine of server 0. In mode sync it is of the step that the
 * calling trainer sent last, and a reader saves one only when no trainer is connected; in other modes its parts may be
 * of different updates.
 *
 * @param path where, below the server's model directory.
 * @return PSERVER_OK or PSERVER_ERROR.
 */
int paddle_save_model_go(paddle_pserver_client client,
                         char *path);

/**
 * @brief Why this thread's last failing call failed: which argument, what was found, what was expected.
 *
 * @return the text, which ends with a NUL and is the library's; empty if no call of this thread has failed. It
 * stays as it is until the thread's next failing call, or its end.
 */
const char *paddle_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
