"""PaddlePaddle's parameter server over brpc: one trainer sets a dense table and gets it back; nothing is summed.

Its trainers cannot be given a sum: in sync mode the wheel's trainer crashes with one dense parameter.
"""

import os

import numpy
import paddle
from paddle.base import core
from paddle.distributed import fleet

import rounds


def join(options, role):
    """A job of one server and one trainer with one dense parameter."""
    paddle.enable_static()
    os.environ.update(FLAGS_LAUNCH_BARRIER="0")
    server = f"{rounds.address(options, 'server')}:{options.port}"
    kind = fleet.base.role_maker.Role.SERVER if role == "server" else fleet.base.role_maker.Role.WORKER
    fleet.init(fleet.base.role_maker.UserDefinedRoleMaker(
        is_collective=False, init_gloo=False, current_id=0, role=kind, worker_num=1, server_endpoints=[server]))
    weight = paddle.static.create_parameter([options.bytes // 4], "float32", name="weight",
                                            default_initializer=paddle.nn.initializer.Constant(0.0))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy)
    optimizer.minimize(paddle.mean(weight))


def serve(options):
    rounds.die_with_parent()
    join(options, "server")
    fleet.init_server()
    fleet.run_server()


class Trainer:
    def __init__(self, options):
        join(options, "trainer")
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(paddle.static.default_startup_program())
        # It gives up at once when the server is not there yet.
        rounds.wait_for(rounds.address(options, "server"), options.port)
        fleet.init_worker()
        runtime = fleet.fleet._runtime_handle
        self.worker, self.scope = runtime._worker, paddle.static.global_scope()
        self.table = next(iter(runtime._send_ctx.values())).table_id()
        self.tensor = self.scope.var("weight").get_tensor()
        self.host = numpy.zeros(options.bytes // 4, numpy.float32)

    def gradient(self):
        return self.host

    def settle(self):
        self.tensor.set(self.host, core.CPUPlace())

    def round(self):
        self.worker.push_dense_params(self.scope, self.table, ["weight"])
        self.worker.pull_dense_params(self.scope, self.table, ["weight"])

    def value(self):
        return numpy.array(self.tensor)


if __name__ == "__main__":
    rounds.main("PaddlePaddle brpc, set and get", paddle.__version__, Trainer, {"server": serve})
