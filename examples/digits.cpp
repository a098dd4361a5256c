// A trainer in C++17: several processes teach a network of two layers to read handwritten digits, with gradients of
// their own.
//
//     c++ -std=c++17 digits.cpp $(pkg-config --cflags --libs paddle_pserver) -o digits
//     ./digits digits.csv 4
//
// The arguments are the data (64 pixels and the digit in a line) and the number of trainers, as the servers expect it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <paddle_pserver.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr std::size_t pixel_count = 64, hidden_count = 32, class_count = 10, batch = 16, epochs = 30;

struct digit {
  std::vector<float> pixels;
  std::size_t label;
};

struct examples {
  std::vector<digit> training, held_out;
};

// A layer's weights, input after input, and its biases; or their gradients.
struct layer {
  layer(std::size_t inputs, std::size_t outputs) : weight(inputs * outputs), bias(outputs) {}

  std::vector<float> apply(const std::vector<float> &input) const {
    std::vector<float> output = bias;
    for (std::size_t from = 0; from < input.size(); from++) {
      for (std::size_t to = 0; to < output.size(); to++) output[to] += input[from] * weight[from * output.size() + to];
    }
    return output;
  }

  std::vector<float> weight, bias;
};

struct network {
  layer first{pixel_count, hidden_count}, second{hidden_count, class_count};

  std::vector<float> hidden(const digit &one) const {
    std::vector<float> output = first.apply(one.pixels);
    for (float &each : output) each = std::max(each, 0.0F);
    return output;
  }
};

// The fifth digit of every five is held out.
examples read(const std::string &path) {
  examples read;
  std::ifstream file(path);
  std::string line;
  for (std::size_t count = 0; std::getline(file, line); count++) {
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream numbers(line);
    digit one{std::vector<float>(pixel_count), 0};
    for (float &pixel : one.pixels) {
      numbers >> pixel;
      pixel /= 16.0F;
    }
    if (numbers >> one.label) (count % 5 == 4 ? read.held_out : read.training).push_back(one);
  }
  if (read.training.empty()) throw std::runtime_error(path + " has no digits");
  return read;
}

// Adds one digit's part of the gradient of the mean loss of a batch.
void differentiate(const network &model, const digit &one, network &gradient) {
  const std::vector<float> hidden = model.hidden(one);
  std::vector<float> error = model.second.apply(hidden);
  const float largest = *std::max_element(error.begin(), error.end());
  float sum = 0;
  for (float &each : error) sum += each = std::exp(each - largest);
  for (float &each : error) each /= sum * batch;
  error[one.label] -= 1.0F / batch;
  for (std::size_t to = 0; to < class_count; to++) gradient.second.bias[to] += error[to];
  for (std::size_t from = 0; from < hidden_count; from++) {
    float back = 0;
    for (std::size_t to = 0; to < class_count; to++) {
      gradient.second.weight[from * class_count + to] += hidden[from] * error[to];
      back += model.second.weight[from * class_count + to] * error[to];
    }
    if (hidden[from] == 0) continue;
    gradient.first.bias[from] += back;
    for (std::size_t pixel = 0; pixel < pixel_count; pixel++) {
      gradient.first.weight[pixel * hidden_count + from] += one.pixels[pixel] * back;
    }
  }
}

double accuracy(const network &model, const std::vector<digit> &digits) {
  const auto is_right = [&](const digit &one) {
    const std::vector<float> scores = model.second.apply(model.hidden(one));
    return std::max_element(scores.begin(), scores.end()) - scores.begin() == static_cast<std::ptrdiff_t>(one.label);
  };
  return static_cast<double>(std::count_if(digits.begin(), digits.end(), is_right)) /
         static_cast<double>(digits.size());
}

void initialise(pserver::client &client, network &model) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> weights(-0.2F, 0.2F);
  for (layer *each : {&model.first, &model.second}) {
    for (float &weight : each->weight) weight = weights(random);
  }
  client.init_param({"layer1/weight", model.first.weight}, {pixel_count, hidden_count});
  client.init_param({"layer1/bias", model.first.bias});
  client.init_param({"layer2/weight", model.second.weight}, {hidden_count, class_count});
  client.init_param({"layer2/bias", model.second.bias});
  client.finish_init_params();
}

void train(const std::string &path, std::size_t trainers) {
  const examples digits = read(path);
  pserver::client client;
  network model;
  // One trainer is chosen to initialise; the others wait here.
  if (client.begin_init_params("optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }")) {
    initialise(client, model);
  }
  client.get_params({{"layer1/weight", model.first.weight},
                     {"layer1/bias", model.first.bias},
                     {"layer2/weight", model.second.weight},
                     {"layer2/bias", model.second.bias}});
  // 0, or where an earlier process of this rank has ended.
  std::uint64_t step = client.resume_rounds();
  std::size_t next = static_cast<std::size_t>(client.trainer_id()) + step * batch * trainers;
  // All trainers make the same number of steps.
  for (; step < epochs * digits.training.size() / (batch * trainers); step++) {
    network gradient;
    for (std::size_t each = 0; each < batch; each++) {
      differentiate(model, digits.training[next % digits.training.size()], gradient);
      next += trainers;
    }
    // The servers average the gradients of all trainers, update the parameters, and send them back.
    client.push_pull({{"layer1/weight", gradient.first.weight, model.first.weight},
                      {"layer1/bias", gradient.first.bias, model.first.bias},
                      {"layer2/weight", gradient.second.weight, model.second.weight},
                      {"layer2/bias", gradient.second.bias, model.second.bias}});
  }
  std::printf("trainer %d: accuracy %.1f %% on held-out digits\n", client.trainer_id(),
              100 * accuracy(model, digits.held_out));
  client.leave();
}

}  // namespace

int main(int count, char **arguments) {
  if (count != 3) {
    std::fprintf(stderr, "expected: digits DATA TRAINERS\n");
    return 2;
  }
  try {
    train(arguments[1], std::stoul(arguments[2]));
  } catch (const std::exception &failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
