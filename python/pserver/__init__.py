"""A parameter server's trainers: parameters live on servers, which apply optimizers to the gradients of all trainers.

>>> import numpy, pserver
>>> client = pserver.connect(servers=1)
>>> client.init_all({"w": numpy.ones(3, numpy.float32)}, "optimizer: SGD const_lr { learning_rate: 0.5 }")
True
>>> client.push_pull({"w": numpy.ones(3, numpy.float32)})["w"]
array([0.5, 0.5, 0.5], dtype=float32)
>>> client.close()
"""

from ._errors import Cancelled, Error, MissingTrainer, NotInitialised, Refused, ServerLost, Timeout

try:
    import pserver._pserver
except ModuleNotFoundError as missing:
    # A folder of sources without the extension: `pserver.export` needs none.
    if missing.name != "pserver._pserver":
        raise
else:
    from ._client import Call, Checkpoint, Client, Parameter, Rows, State, connect, last_client
    from ._pserver import Tensor
    from ._servers import Servers

__all__ = [
    "Call",
    "Cancelled",
    "Checkpoint",
    "Client",
    "Error",
    "MissingTrainer",
    "NotInitialised",
    "Parameter",
    "Refused",
    "Rows",
    "ServerLost",
    "Servers",
    "State",
    "Tensor",
    "Timeout",
    "connect",
    "last_client",
]
