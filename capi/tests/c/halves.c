/* Mixed precision: the server has float32, gradients and parameters travel as halves, and the numbers are those of
 * plain code to the bit. */
#include <paddle_pserver.h>

#include "check.h"

enum { COUNT = 50000, STEPS = 12 };

static float master[COUNT], target[COUNT], fetched[COUNT];
static uint16_t gradient[COUNT], halves[COUNT], expected[COUNT];
static double wide[4];

static uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

static float number_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

/* A finite number as bfloat16: of the two beside it the nearer one, of two equally near the even one. */
static uint16_t brain(float number) {
  uint32_t bits = bits_of(number), below = bits >> 16, rest = bits & 0xffff;
  return (uint16_t)(below + (rest > 0x8000 || (rest == 0x8000 && (below & 1))));
}

static float of_brain(uint16_t half) { return number_of((uint32_t)half << 16); }

/* A number of binary16. */
static float of_half(uint16_t half) {
  int exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  float magnitude = (float)(exponent == 0 ? fraction : fraction + 1024) / 16777216.0f;
  for (; exponent > 1; exponent--) magnitude *= 2;
  return half & 0x8000 ? -magnitude : magnitude;
}

/* The binary16 nearest to a finite number that is in its range, by bisection. */
static uint16_t half(float number) {
  float magnitude = number < 0 ? -number : number;
  uint16_t low = 0, high = 0x7bff;
  while (high - low > 1) {
    uint16_t middle = (uint16_t)((low + high) / 2);
    if (of_half(middle) <= magnitude) low = middle;
    else high = middle;
  }
  {
    float below = magnitude - of_half(low), above = of_half(high) - magnitude;
    uint16_t nearest = below < above || (below == above && !(low & 1)) ? low : high;
    return (uint16_t)(nearest | (bits_of(number) >> 16 & 0x8000));
  }
}

static paddle_parameter parameter(const char *name, paddle_element_type type, void *content, int content_len) {
  paddle_parameter made;
  made.name = (char *)name;
  made.element_type = type;
  made.content = content;
  made.content_len = content_len;
  return made;
}

static void refused(paddle_pserver_client *client) {
  const char *names[1] = {"wide"};
  paddle_element_type type = PADDLE_ELEMENT_TYPE_BFLOAT16;
  paddle_view *view = NULL;
  paddle_parameter dst = parameter(NULL, PADDLE_ELEMENT_TYPE_FLOAT16, halves, sizeof halves);
  dst.content_len = sizeof wide / 4;
  REFUSED(paddle_get_params(client, names, &dst, 1), "\"wide\": its value as float16; expected float64");
  REFUSED(paddle_get_params_view_as(client, names, &type, 1, &view), "\"wide\": its value as bfloat16; expected float64");
  names[0] = "w";
  dst.content_len = sizeof halves - 2;
  REFUSED(paddle_get_params(client, names, &dst, 1), "has room for 99998 bytes (content_len); expected room for its 200000");
  CHECK(dst.name == NULL && dst.element_type == PADDLE_ELEMENT_TYPE_FLOAT16);
  type = PADDLE_ELEMENT_TYPE_FLOAT64;
  REFUSED(paddle_get_params_view_as(client, names, &type, 1, &view), "\"w\": its value as float64; expected float32");
  REFUSED(paddle_get_params_view_as(client, names, NULL, 1, &view), "element_types is NULL");
  CHECK(view == NULL);
}

/* A view of halves is half as long. */
static void viewed(paddle_pserver_client *client) {
  const char *names[1] = {"w"};
  paddle_element_type type = PADDLE_ELEMENT_TYPE_FLOAT16;
  paddle_tensor grad = {"w", PADDLE_ELEMENT_TYPE_BFLOAT16, gradient, sizeof gradient, NULL, 0};
  paddle_view *view;
  const void *content;
  size_t bytes, all = 0;
  int piece, index;
  for (index = 0; index < COUNT; index++) expected[index] = half(master[index]);
  CHECK(paddle_get_params_view_as(client, names, &type, 1, &view) == 0);
  for (piece = 0; piece < paddle_view_pieces(view, 0); piece++) {
    CHECK(paddle_view_piece(view, 0, piece, &content, &bytes) == 0);
    CHECK(memcmp(content, (const char *)expected + all, bytes) == 0);
    all += bytes;
  }
  CHECK(all == sizeof halves && paddle_view_release(view) == 0);
  type = PADDLE_ELEMENT_TYPE_BFLOAT16;
  memset(gradient, 0, sizeof gradient);
  for (index = 0; index < COUNT; index++) expected[index] = brain(master[index]);
  view = paddle_transfer_view(client, &grad, &type, 1, NULL);
  CHECK(view != NULL);
  CHECK(paddle_view_piece(view, 0, 0, &content, &bytes) == 0);
  CHECK(memcmp(content, expected, bytes) == 0 && paddle_view_release(view) == 0);
}

int main(void) {
  paddle_pserver_client *client = paddle_new_pserver_client();
  paddle_gradient grad = parameter("w", PADDLE_ELEMENT_TYPE_BFLOAT16, gradient, sizeof gradient);
  paddle_parameter dst = parameter(NULL, PADDLE_ELEMENT_TYPE_BFLOAT16, halves, sizeof halves);
  const char *names[1] = {"w"};
  paddle_call *call;
  int index, step;
  CHECK(client != NULL);
  for (index = 0; index < COUNT; index++) {
    master[index] = (float)(index % 977) / 977.0f - 0.5f;
    target[index] = (float)(index % 613) / 613.0f - 0.4f;
  }
  CHECK(paddle_begin_init_params(client, "optimizer: SGD const_lr { learning_rate: 0.25 }") == 1);
  CHECK(paddle_init_param(client, parameter("w", PADDLE_ELEMENT_TYPE_FLOAT32, master, sizeof master), NULL) == 0);
  CHECK(paddle_init_param(client, parameter("wide", PADDLE_ELEMENT_TYPE_FLOAT64, wide, sizeof wide), NULL) == 0);
  CHECK(paddle_finish_init_params(client) == 0);
  refused(client);

  CHECK(paddle_get_params(client, names, &dst, 1) == 0);
  CHECK(dst.element_type == PADDLE_ELEMENT_TYPE_BFLOAT16 && dst.content_len == sizeof halves);
  for (step = 0; step < STEPS; step++) {
    /* What a trainer sees is the half; what is updated is the whole. */
    for (index = 0; index < COUNT; index++) {
      CHECK(halves[index] == brain(master[index]));
      gradient[index] = brain(of_brain(halves[index]) - target[index]);
      master[index] -= 0.25f * of_brain(gradient[index]);
    }
    if (step % 2 == 0) {
      CHECK(paddle_push_pull(client, &grad, &dst, 1) == 0);
    } else {
      CHECK(paddle_push_pull_start(client, &grad, &dst, 1, &call) == 0);
      CHECK(paddle_wait(call) == 0);
    }
    CHECK(dst.name == grad.name && dst.element_type == PADDLE_ELEMENT_TYPE_BFLOAT16);
    CHECK(dst.content_len == sizeof halves);
  }
  dst = parameter(NULL, PADDLE_ELEMENT_TYPE_FLOAT32, fetched, sizeof fetched);
  CHECK(paddle_get_params(client, names, &dst, 1) == 0 && dst.content_len == sizeof fetched);
  CHECK(memcmp(fetched, master, sizeof master) == 0);
  viewed(client);

  /* Who never set a type may have left one there: with room for the whole, or none, it comes as it is. */
  dst = parameter(NULL, PADDLE_ELEMENT_TYPE_FLOAT16, NULL, 0);
  CHECK(paddle_get_params(client, names, &dst, 1) == 0 && dst.content_len == sizeof fetched);
  CHECK(dst.element_type == PADDLE_ELEMENT_TYPE_FLOAT32 && memcmp(dst.content, master, sizeof master) == 0);
  CHECK(paddle_parameter_release(&dst) == 0);
  for (index = 0; index < 2; index++) {
    dst = parameter(NULL, index == 0 ? PADDLE_ELEMENT_TYPE_INT32 : PADDLE_ELEMENT_TYPE_BFLOAT16, fetched, sizeof fetched);
    memset(fetched, 0, sizeof fetched);
    CHECK(paddle_get_params(client, names, &dst, 1) == 0 && dst.element_type == PADDLE_ELEMENT_TYPE_FLOAT32);
    CHECK(memcmp(fetched, master, sizeof master) == 0);
  }
  paddle_pserver_client_release(client);
  return 0;
}
