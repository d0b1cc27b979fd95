"""How ranks combine gradients or weights: the mathematics.

::

    strategy             the base classes, and what a strategy may use of the ranks
    gradient_averaging   Synchronous, Centralized; ShardedOptimizer and FullyShard, with state or
                         weights divided among the ranks as well
    decoupled_momentum   DeMo: the mean of the momenta's strongest frequencies in every step
    weight_averaging     LocalSGD, DiLoCo, ElasticAveraging, Gossip: local weights, and agreements
                         after every few steps
    parameter_server     ParameterServer: a server that takes each rank's steps as they come

A strategy is a frozen dataclass, on vectors that may be PyTorch's or NumPy's;
``hvkit.sync.rounds`` calls it at the right step, and checkpoints save its state. To add one that
agrees on weights, write a subclass of ``Rounds``, import it below, and name it in
``hvkit/__init__.py``. That also makes it a value of the recipes' ``--strategy``.
"""

from hvkit.strategies.decoupled_momentum import DeMo as DeMo
from hvkit.strategies.gradient_averaging import Centralized as Centralized
from hvkit.strategies.gradient_averaging import FullyShard as FullyShard
from hvkit.strategies.gradient_averaging import ShardedOptimizer as ShardedOptimizer
from hvkit.strategies.gradient_averaging import Synchronous as Synchronous
from hvkit.strategies.parameter_server import ParameterServer as ParameterServer
from hvkit.strategies.weight_averaging import DiLoCo as DiLoCo
from hvkit.strategies.weight_averaging import ElasticAveraging as ElasticAveraging
from hvkit.strategies.weight_averaging import Gossip as Gossip
from hvkit.strategies.weight_averaging import LocalSGD as LocalSGD
