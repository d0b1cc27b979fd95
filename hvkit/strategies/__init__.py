"""How ranks are kept in step: what they agree on, and when. One file for each strategy.

::

    strategy             the base classes, and what a strategy may use of the ranks
    synchronous          the mean of the gradients in every step
    centralized          the same through one rank
    sharded_optimizer    the same, with the optimizer's state divided among the ranks
    fully_shard          weights, gradients and state divided among the ranks
    decoupled_momentum   the mean of the momenta's strongest frequencies in every step
    local_sgd            the mean of the weights, every few steps
    diloco               the same, as a step of an outer optimizer
    elastic_averaging    weights and a common centre that pull at each other
    gossip               the mean of the weights of neighbours
    parameter_server     a server that takes each rank's steps as they come

A strategy is a frozen dataclass. It holds the mathematics, on vectors that may be PyTorch's or
NumPy's; ``hvkit.sync.rounds`` calls it at the right step, and checkpoints save its state. To add
one that agrees on weights, write a subclass of ``Rounds`` in a new file, and import it
below: that also makes it ``hvkit.NAME``, and a value of the recipes' ``--strategy``.
"""

from hvkit.strategies.centralized import Centralized as Centralized
from hvkit.strategies.decoupled_momentum import DeMo as DeMo
from hvkit.strategies.diloco import DiLoCo as DiLoCo
from hvkit.strategies.elastic_averaging import ElasticAveraging as ElasticAveraging
from hvkit.strategies.fully_shard import FullyShard as FullyShard
from hvkit.strategies.gossip import Gossip as Gossip
from hvkit.strategies.local_sgd import LocalSGD as LocalSGD
from hvkit.strategies.parameter_server import ParameterServer as ParameterServer
from hvkit.strategies.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from hvkit.strategies.synchronous import Synchronous as Synchronous
