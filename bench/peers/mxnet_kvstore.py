"""MXNet's kvstore in its dist_sync mode, which is ps-lite: a scheduler, a server, and trainers that push and pull."""

import os

import numpy

# MXNet says np.bool, which was Python's own.
numpy.bool = bool

if os.environ.get("DMLC_ROLE") in ("scheduler", "server"):
    import rounds

    rounds.die_with_parent()
    # Importing it runs the role, until the job ends.
    import mxnet
    raise SystemExit
import mxnet

import rounds


class Trainer:
    def __init__(self, options):
        self.store = mxnet.kv.create("dist_sync")
        shape = (options.bytes // 4,)
        self.given, self.wanted = mxnet.nd.zeros(shape), mxnet.nd.zeros(shape)
        self.host = numpy.zeros(shape, numpy.float32)
        self.store.init("weight", self.wanted)

    def gradient(self):
        return self.host

    def settle(self):
        self.given[:] = self.host
        self.given.wait_to_read()

    def round(self):
        self.store.push("weight", self.given)
        self.store.pull("weight", out=self.wanted)
        self.wanted.wait_to_read()

    def value(self):
        return self.wanted.asnumpy()


def environment(options, role, index):
    return rounds.ps_lite(options, role, index)


if __name__ == "__main__":
    roles = dict.fromkeys(["scheduler", "server"])
    rounds.main("MXNet kvstore", mxnet.__version__, Trainer, roles, environment)
