// pserver::program against real servers: data, a step, and values in vectors, in memory of the program, and refused.
#include <cstdlib>
#include <iostream>
#include <paddle_pserver.hpp>

#include "check.hpp"

namespace {

const char *const text =
    "block 0 {\n"
    "    data x: float32[batch, 2]\n"
    "    parameter w: float32[2, 1]\n"
    "    initialise w = fill(value=0.5)\n"
    "    forward y = matmul(x, w)\n"
    "    forward loss = reduce_sum(y)\n"
    "}\n";

}  // namespace

int main() {
  pserver::client client;
  pserver::program program(client, text, "", "optimizer: SGD const_lr { learning_rate: 0.25 }", 2);
  const std::vector<float> x{1, 2, 3, 4};
  const std::vector<double> wide(4);
  CHECK(has(refusal([&] { program.feed({}); }), "data: length 0"));
  CHECK(has(refusal([&] { program.feed({{"x", wide}}); }), "found elements of float64; expected float32"));
  program.feed({{"x", x}});
  program.step();
  // y is x * w, so the gradient of w is the sum of the rows.
  CHECK(program.value("loss") == 5.0);
  CHECK(program.fetch<float>("y") == (std::vector<float>{1.5F, 3.5F}));
  std::vector<float> w(2), longer(3);
  program.fetch({"w", w});
  CHECK(w[0] == -0.5F && w[1] == -1.0F);
  CHECK(program.fetch<float>("w") == w);
  CHECK(has(refusal([&] { (void)program.fetch<double>("w"); }), "w: found element type 4; expected 5"));
  CHECK(has(refusal([&] { program.fetch({"w", longer}); }), "12 bytes of float32; expected 8 bytes of float32"));
  CHECK(has(refusal([&] { (void)program.fetch<float>("none"); }), "none"));
  client.leave();
  std::cout << "ok\n";
}
