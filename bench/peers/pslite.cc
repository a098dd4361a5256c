// BytePS's copy of ps-lite for pslite.py, which loads this: a scheduler, a trainer's end, a server that sums, and
// BytePS's own server. Environment variables (DMLC_*) say who a process is and where the others are.
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "ps/ps.h"

extern "C" void byteps_server();

namespace {

// What BytePS cuts a tensor into, as it comes.
const size_t PART = 4096000;

// One part of the tensor. The first gradient of a round becomes its sum, as it was received; answers share it, so that
// nobody writes what is on its way.
struct Part {
    ps::SArray<char> open, done;
    size_t arrived = 0;
    uint64_t rounds = 0;
    std::map<int, uint64_t> pushed;
    std::vector<ps::KVMeta> waiting;
};

class Sums {
  public:
    void operator()(const ps::KVMeta &asked, const ps::KVPairs<char> &given, ps::KVServer<char> *server) {
        std::lock_guard<std::mutex> turn(lock_);
        Part &part = parts_[given.keys[0]];
        if (!asked.push) {
            if (part.pushed[asked.sender] > part.rounds) part.waiting.push_back(asked);
            else answer(asked, given.keys[0], part, server);
            return;
        }
        if (part.arrived == 0) part.open = given.vals;
        else add((float *)part.open.data(), (const float *)given.vals.data(), given.vals.size() / sizeof(float));
        part.pushed[asked.sender]++;
        server->Response(asked);
        if (++part.arrived < (size_t)ps::NumWorkers()) return;
        part.done = part.open;
        part.open = ps::SArray<char>();
        part.arrived = 0;
        part.rounds++;
        for (const auto &one : part.waiting) answer(one, given.keys[0], part, server);
        part.waiting.clear();
    }

  private:
    static void add(float *sum, const float *gradient, size_t count) {
        for (size_t index = 0; index < count; index++) sum[index] += gradient[index];
    }

    static void answer(const ps::KVMeta &asked, ps::Key key, const Part &part, ps::KVServer<char> *server) {
        ps::KVPairs<char> value;
        value.keys = ps::SArray<ps::Key>(1, key);
        value.vals = part.done;
        value.lens = ps::SArray<int>(1, (int)part.done.size());
        server->Response(asked, value);
    }

    std::mutex lock_;
    std::map<ps::Key, Part> parts_;
};

struct Trainer {
    ps::KVWorker<char> worker{0, 0};
    std::vector<ps::SArray<ps::Key>> keys;
    std::vector<ps::SArray<int>> lengths;
    std::vector<ps::SArray<char>> gradients, values;
};

Trainer *trainer;

}  // namespace

extern "C" void pslite_scheduler() {
    ps::Start(0);
    ps::Finalize(0, true);
}

extern "C" void pslite_sums() {
    auto server = new ps::KVServer<char>(0);
    static Sums sums;
    server->set_request_handle([](const ps::KVMeta &asked, const ps::KVPairs<char> &given,
                                  ps::KVServer<char> *server) { sums(asked, given, server); });
    ps::Start(0);
    ps::Finalize(0, true);
}

// Also BytePS's scheduler.
extern "C" void pslite_byteps() { byteps_server(); }

// Joins the job; every trainer's first push makes room in BytePS's server.
extern "C" void pslite_join(char *gradient, char *value, size_t bytes) {
    ps::Start(0);
    trainer = new Trainer;
    // Parts go to the servers in turn.
    const auto &ranges = ps::Postoffice::Get()->GetServerKeyRanges();
    for (size_t from = 0; from < bytes; from += PART) {
        const size_t length = std::min(PART, bytes - from), part = from / PART;
        trainer->keys.push_back(ps::SArray<ps::Key>(1, ranges[part % ranges.size()].begin() + part / ranges.size()));
        trainer->lengths.push_back(ps::SArray<int>(1, (int)length));
        trainer->gradients.push_back(ps::SArray<char>(gradient + from, length, false));
        trainer->values.push_back(ps::SArray<char>(value + from, length, false));
    }
    for (size_t part = 0; part < trainer->keys.size(); part++)
        trainer->worker.Wait(
            trainer->worker.ZPush(trainer->keys[part], trainer->gradients[part], trainer->lengths[part]));
}

extern "C" void pslite_round() {
    std::vector<int> requests;
    for (size_t part = 0; part < trainer->keys.size(); part++) {
        const auto &keys = trainer->keys[part];
        requests.push_back(trainer->worker.ZPush(keys, trainer->gradients[part], trainer->lengths[part]));
        requests.push_back(trainer->worker.ZPull(keys, &trainer->values[part], &trainer->lengths[part]));
    }
    for (int request : requests) trainer->worker.Wait(request);
}
