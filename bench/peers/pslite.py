"""ps-lite as BytePS ships it, over TCP or its unix sockets: with a server that sums, or with BytePS's own."""

import ctypes
import os
import sys

import numpy

import rounds

# Its virtual environment, where the library is. A script is started again by its name for every process.
HERE = os.path.dirname(os.path.dirname(sys.executable))
BYTEPS = os.path.basename(sys.argv[0]) == "byteps.py"


def library():
    return ctypes.CDLL(os.path.join(HERE, "pslite.so"))


class Trainer:
    def __init__(self, options):
        self.library = library()
        self.given, self.wanted = (numpy.zeros(options.bytes // 4, numpy.float32) for _ in range(2))
        # Memory that was never written is one page for all of it, and cheaper to send than any gradient.
        self.given[:] = 0
        self.wanted[:] = 0
        address = lambda array: ctypes.c_void_p(array.ctypes.data)
        self.library.pslite_join(address(self.given), address(self.wanted), ctypes.c_size_t(options.bytes))

    def gradient(self):
        return self.given

    def settle(self):
        pass

    def round(self):
        self.library.pslite_round()

    def value(self):
        return self.wanted


def scheduler(_options):
    rounds.die_with_parent()
    one = library()
    (one.pslite_byteps if BYTEPS else one.pslite_scheduler)()


def server(_options):
    rounds.die_with_parent()
    one = library()
    (one.pslite_byteps if BYTEPS else one.pslite_sums)()


def environment(options, role, index):
    return rounds.ps_lite(options, role, index) | {
        "DMLC_LOCAL": "1" if options.transport == "shm" else "0",
        # Of two cores; as shipped it has four of each.
        "BYTEPS_ZMQ_NTHREADS": "1",
        "BYTEPS_SERVER_ENGINE_THREAD": "1",
    }


def main():
    roles = {"scheduler": scheduler, "server": server}
    rounds.main("BytePS" if BYTEPS else "ps-lite", "0.2.5.post15", Trainer, roles, environment)


if __name__ == "__main__":
    main()
