"""How ranks are kept in step: what they agree on, and when. One file for each strategy.

::

    strategy           the base classes, and what a strategy may use of the ranks
    synchronous        the mean of the gradients in every step
    centralized        the same through one rank
    local_sgd          the mean of the weights, every so many steps
    diloco             the same, as a step of an outer optimizer
    gossip             the mean of the weights of neighbours
    parameter_server   a server that takes each rank's steps as they come

A strategy is a frozen dataclass. It holds the mathematics, on vectors that may be PyTorch's,
TensorFlow's or NumPy's; ``adapters/pytorch/rounds.py`` and ``adapters/keras/rounds.py`` call it at
the right step, and checkpoints save its state. To add one that agrees on weights, write a subclass
of ``Rounds`` in a file of its own, and export it here and in ``hvkit/__init__.py``.
"""

from hvkit.strategies.centralized import Centralized
from hvkit.strategies.diloco import DiLoCo
from hvkit.strategies.gossip import Gossip
from hvkit.strategies.local_sgd import LocalSGD
from hvkit.strategies.parameter_server import ParameterServer
from hvkit.strategies.strategy import Strategy
from hvkit.strategies.synchronous import Synchronous

__all__ = [
    "Centralized",
    "DiLoCo",
    "Gossip",
    "LocalSGD",
    "ParameterServer",
    "Strategy",
    "Synchronous",
]
