// Every class of paddle_pserver.hpp against real servers: initialisation, exchanges, transfers, started calls, views,
// rows, states, buffers, programs, and errors as exceptions.
#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <paddle_pserver.hpp>

#include "check.hpp"

namespace {

void initialise(pserver::client &client) {
  const std::vector<float> weight(6, 1.0F);
  const double bias[2] = {1.0, 2.0};
  const float moved[2] = {0.0F, 0.0F};
  CHECK(client.begin_init_params("optimizer: SGD const_lr { learning_rate: 0.5 }"));
  client.init_param({"weight", weight}, {2, 3});
  client.init_param({std::string("bias"), bias}, "algorithm: 'add'");
  client.init_rows<float>("rows", "optimizer: SGD const_lr { learning_rate: 1 } sparse { height: 9 width: 2 }");
  client.init_param({"moved", moved}, "optimizer: SGD const_lr { learning_rate: 0.5 } sgd { momentum: 0.5 }");
  CHECK(has(refusal([&] { client.init_param({"weight", weight}); }), "weight"));
  client.finish_init_params();
}

void exchange(pserver::client &client) {
  std::array<float, 6> weight{}, gradient{2, 2, 2, 2, 2, 2};
  std::vector<double> bias(2), difference{0.25, 0.25};
  client.push_pull({{"weight", gradient, weight}, {std::string("bias"), difference, bias}});
  CHECK(weight[0] == 0.0F && weight[5] == 0.0F && bias[1] == 2.25);
  client.send_grads({{"weight", gradient}, {"bias", difference}});
  std::vector<pserver::float16> half(6);
  client.get_params({{"weight", half}, {"bias", bias}});
  CHECK(half[5].bits == 0xbc00 && bias[0] == 1.5);

  pserver::call started = client.push_pull_start({{"weight", gradient, weight}});
  pserver::call moved = std::move(started);
  moved.wait();
  CHECK(weight[3] == -2.0F);
  CHECK(has(refusal([&] { moved.wait(); }), "NULL") || !refusal([&] { moved.wait(); }).empty());
}

std::vector<double> biases(pserver::client &client) {
  std::vector<double> found(2);
  client.get_params({{"bias", found}});
  return found;
}

void read_in_place(pserver::client &client) {
  pserver::buffer<float> gradient = client.buffer_alloc<float>(6);
  CHECK(gradient.size() == 6 && gradient[0] == 0.0F);
  for (float &each : gradient) each = 2.0F;
  pserver::view view = client.transfer_view({{"weight", gradient}});
  float sum = 0.0F;
  for (int piece = 0; piece < view.pieces(0); piece++) {
    for (float each : view.piece<float>(0, piece)) sum += each;
  }
  CHECK(sum == -18.0F);
  CHECK(!refusal([&] { (void)client.get_params_view({"weight"}); }).empty());
  view.release();
  const std::vector<double> difference(2, 0.5), bias = biases(client);
  {
    pserver::view both = client.transfer_view({{"weight", gradient}, {"bias", difference}},
                                              {PADDLE_ELEMENT_TYPE_BFLOAT16, PADDLE_ELEMENT_TYPE_FLOAT64}, 0.25);
    CHECK(both.piece<pserver::bfloat16>(0, 0)[0].bits == 0xc060);  // -3.5
    CHECK(both.piece<double>(1, 0)[1] == bias[1] + 0.5);
  }
  const std::vector<paddle_element_type> types(2, PADDLE_ELEMENT_TYPE_FLOAT32);
  CHECK(has(refusal([&] { (void)client.transfer_view({{"weight", gradient}}, types); }), "1 gradients and 2 types"));
  CHECK(has(refusal([&] { (void)client.transfer_view({}); }), "grads: length 0"));
  (void)client.get_params_view({"weight", "bias"});
  (void)client.buffer_path(gradient.data());
  std::vector<float> own(4096);
  pserver::registration registered = client.register_buffer(own.data(), own.size() * sizeof(float));
  registered.release();
}

void use_rows(pserver::client &client) {
  const std::vector<std::uint64_t> ids{7, 2};
  const std::vector<float> gradient{1, 2, 3, 4};
  std::vector<float> fetched(4);
  client.send_rows({{"rows", ids, gradient}});
  client.get_rows({{"rows", ids, fetched}});
  CHECK(fetched[0] == -1.0F && fetched[3] == -4.0F);
}

void transfer(pserver::client &client) {
  std::vector<float> weight(6), gradient(6, 1.0F), row(2);
  std::vector<double> bias(2), difference(2, 0.5);
  const std::vector<std::uint64_t> ids{7}, others{2};
  client.get_params({{"weight", weight}, {"bias", bias}});
  const float before = weight[0];
  client.transfer({{"weight", gradient}, {"bias", difference}}, {{"weight", weight}, {"bias", bias}}, 0.25);
  CHECK(weight[5] == before - 0.25F);
  client.transfer({{"weight", gradient}});
  client.transfer({}, {{"weight", weight}});
  CHECK(weight[0] == before - 0.75F);
  pserver::call started = client.transfer_start({{"weight", gradient}}, {{"weight", weight}});
  started.wait();
  CHECK(weight[0] == before - 1.25F);
  CHECK(has(refusal([&] { client.transfer({{"weight", gradient}}, {{"weight", weight}, {"bias", bias}}); }), "1 gra"));
  CHECK(has(refusal([&] { client.transfer({{"weight", gradient}}, {}, -1.0); }), "learning rate -1"));
  CHECK(has(refusal([&] { client.transfer({}, std::vector<pserver::rows>()); }), "grads and dst are NULL"));

  const std::vector<float> twos(2, 2.0F);
  client.transfer({{"rows", ids, twos}}, {{"rows", others, row}}, 0.5);
  CHECK(row[0] == -3.0F && row[1] == -4.0F);
  client.transfer_start({}, {{"rows", ids, row}}).wait();
  CHECK(row[0] == -2.0F && row[1] == -3.0F);
  client.set_tensors({{"weight", gradient}});
  client.get_params({{"weight", weight}});
  CHECK(weight[3] == 1.0F);
}

void list_and_restore(pserver::client &client) {
  const auto listed = client.list_params();
  CHECK(listed.size() == 4 && listed[0].name == "weight" && listed[2].is_sparse && !listed[3].is_sparse);
  CHECK(listed[0].shape == (std::vector<std::uint64_t>{2, 3}) && listed[0].content_len == 24);
  CHECK(listed[1].element_type == PADDLE_ELEMENT_TYPE_FLOAT64 && listed[3].version == 0);
  const std::vector<float> gradient{4, 8};
  client.transfer({{"moved", gradient}});
  const pserver::optimizer_state state = client.get_state("moved");
  CHECK(state.size() == 1 && state.updates() == 1 && state.elements<float>(0)[1] == -4.0F);
  CHECK(has(refusal([&] { (void)state.elements<double>(0); }), "found element type 4; expected 5"));
  client.set_state("moved", {{state.name(0), gradient}}, 7);
  CHECK(client.get_state("moved").updates() == 7 && client.get_state("moved").elements<float>(0)[0] == 4.0F);
  CHECK(has(refusal([&] { client.set_state("moved", {}, 7); }), "each once"));
  client.set_state("moved", state);
  CHECK(client.get_state("moved").updates() == 1);

  const std::vector<std::uint64_t> ids{2, 7};
  const std::vector<float> values{1, 2, 3, 4};
  std::vector<float> fetched(4);
  CHECK(client.list_rows("rows") == ids);
  client.set_tensors({{"rows", ids, values}});
  client.get_rows({{"rows", ids, fetched}});
  CHECK(fetched == values);
  const pserver::optimizer_state of_rows = client.get_state("rows", ids);
  CHECK(of_rows.size() == 0 && of_rows.updates() == 2);
  client.set_state("rows", of_rows);
}

void refuse() {
  CHECK(has(refusal([] { pserver::client wrong("deadline=never"); }), "never"));
  pserver::client client("deadline=1s coordinator=tcp://127.0.0.1:1 server_absence=100ms");
  CHECK(!refusal([&] { (void)client.trainer_id(); }).empty());
  client.cancel();
}

}  // namespace

int main() {
  static_assert(!std::is_copy_constructible_v<pserver::client> && std::is_nothrow_move_constructible_v<pserver::client>);
  static_assert(pserver::element_type_of<const std::int64_t>() == PADDLE_ELEMENT_TYPE_INT64);
  CHECK(pserver::version() == paddle_version());
  pserver::client made;
  pserver::client client = std::move(made);
  initialise(client);
  exchange(client);
  read_in_place(client);
  use_rows(client);
  transfer(client);
  list_and_restore(client);
  client.save_model("faces.safetensors");
  CHECK(client.trainer_id() == 0);
  CHECK(has(refusal([&] { pserver::program(client, "no program {", "", "", 1); }), "line"));
  client.leave();
  refuse();
  std::cout << "ok\n";
}
