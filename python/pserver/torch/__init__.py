"""PyTorch's optimizers and embeddings with their state on servers.

Every trainer of a job constructs the same optimizer. The first one's weights are the job's; the others get them. A step
sends the gradients, which the servers merge over all trainers, and fetches the weights with the update in them.
"""

from ._diloco import DiLoCo
from ._embedding import Embedding, EmbeddingBag
from ._models import Follower, follow, load_model, save_model
from ._optimizer import Optimizer
from ._rules import RULES, config

__all__ = [
    "RULES",
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "Follower",
    "Optimizer",
    "config",
    "follow",
    "load_model",
    "save_model",
]
