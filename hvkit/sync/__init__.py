"""The core: rounds, local weights, comparisons of ranks. It imports no framework.

All ports use these modules, but for ``update_hooks``: Keras on TensorFlow has an order of its own,
in ``hvkit.frameworks.keras.on_tensorflow``. Keras on PyTorch has that of PyTorch.

::

    port                   the steps of hvkit.distribute as a protocol
    distributed_objects    the models and optimizers that were distributed
    update_hooks           what PyTorch's port runs around each update, in one order
    rounds                 ends rounds of strategies that agree on weights
    └── agreements         exchanges of an agreement, a strategy's state, comparisons of ranks
    compression_state      the state of a compression: residuals
    local_weights          local weights, as a port shows them, around each step; hvkit.settled
    fingerprints           whether all ranks hold the same weights and buffers
    nonfinite              the sentence about gradients that are NaN or infinite

Scaling and warm-up of the learning rate are computed in ``hvkit.learning_rate``; the ports apply
them.
"""
