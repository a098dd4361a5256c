// All-reduce of gloo over verbs, one process for each rank: RANK RANKS BYTES ROUNDS FOLDER. The ranks meet in FOLDER.
// Prints the median time of a round; every element of every sum is compared.

#include <gloo/allreduce_halving_doubling.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

int main(int count, char** arguments) {
  if (count != 6) {
    std::fprintf(stderr, "usage: %s RANK RANKS BYTES ROUNDS FOLDER\n", arguments[0]);
    return 2;
  }
  const int rank = std::atoi(arguments[1]), ranks = std::atoi(arguments[2]), rounds = std::atoi(arguments[4]);
  const std::size_t elements = std::strtoul(arguments[3], nullptr, 10) / sizeof(float);
  // The second address of soft-RoCE's device is the IPv4 one.
  const gloo::transport::ibverbs::attr device{"rxe0", 1, 1};
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  gloo::rendezvous::FileStore store(arguments[5]);
  auto transport = gloo::transport::ibverbs::CreateDevice(device);
  context->connectFullMesh(store, transport);
  std::vector<float> values(elements);
  const std::vector<float*> pointers{values.data()};
  // The faster of its two for two ranks and 1 MiB. Buffers are registered once.
  gloo::AllreduceHalvingDoubling<float> all_reduce(context, pointers, static_cast<int>(elements));
  std::vector<double> times;
  for (int round = 0; round < rounds; round++) {
    for (std::size_t at = 0; at < elements; at++) values[at] = static_cast<float>(rank + round + at % 7);
    const auto begin = std::chrono::steady_clock::now();
    all_reduce.run();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    for (std::size_t at = 0; at < elements; at++) {
      const float expected = ranks * static_cast<float>(round + at % 7) + ranks * (ranks - 1) / 2.0f;
      if (values[at] != expected) {
        std::fprintf(stderr, "round %d: element %zu is %f, expected %f\n", round, at, values[at], expected);
        return 1;
      }
    }
  }
  std::sort(times.begin(), times.end());
  std::printf("gloo median %.1f us\n", times[times.size() / 2]);
  return 0;
}
