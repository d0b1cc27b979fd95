"""Keras 3 on TensorFlow: gradients are averaged inside the optimizer's own update.

::

    adapter                the steps of distribute
    ├── initial_state      copies rank 0's weights and optimizer state
    ├── optimizers         averaging in optimizer.apply, accumulation, loss scaling
    ├── learning_rate      scaling and warm-up in optimizer.apply
    ├── averager           the mean of a list of gradients
    │   ├── sparse         row-sparse gradients
    │   └── checks         do all ranks hold the same weights, and different data?
    ├── rounds             ends rounds of strategies that agree on weights
    │   ├── round_groups   counts an optimizer's updates, by the variables it updates
    │   ├── agreements     agreements, in the update or beside training
    │   └── weights        a model's weights as vectors; also for the parameter server
    ├── parameter_server   exchanges weights with the server after each update
    ├── sharded            each rank updates the variables it owns, and sends them
    ├── batch_norm         statistics over ranks
    ├── fit                fit and evaluate: metrics of all ranks
    │   └── callbacks      all ranks stop together, only rank 0 writes files
    ├── refusals           updates by other optimizers, and inside XLA
    ├── graph_collectives  waits counted in graphs, sums in 16 bits; used by most of the above
    └── wire, ops          tensors to the other ranks and back; operations for compressions
"""

from hvkit.adapters.keras.adapter import KerasAdapter

__all__ = ["KerasAdapter"]
