"""Keras 3 on TensorFlow: gradients are averaged inside the optimizer's own update.

::

    port                   the steps of distribute
    ├── initial_state      copies rank 0's weights and optimizer state
    ├── adapted            copies what rank 0's layers have learnt from data: vocabularies
    ├── optimizers         averaging in optimizer.apply, accumulation, loss scaling
    ├── learning_rate      scaling and warm-up in optimizer.apply
    ├── gradients/         the mean of a list of gradients (averager)
    ├── weights/           for ranks that train alone: rounds, the parameter server
    ├── sharded            each rank updates the variables it owns, and sends them
    │   └── trials         an optimizer of a user's own, tried on a few small variables
    ├── batch_norm         statistics over ranks
    ├── buffers            what else forward passes learn: means, and differences
    ├── fit                fit and evaluate on all ranks
    │   ├── metric_results the results of metrics over all ranks
    │   └── callbacks      all ranks stop together, only rank 0 writes files
    ├── refusals           updates by other optimizers, and inside XLA
    ├── checks             do all ranks hold the same weights, and different data?
    └── collectives/       collectives in eager code and in graphs; used by most of the above
"""

from hvkit.frameworks.keras.port import KerasPort

__all__ = ["KerasPort"]
