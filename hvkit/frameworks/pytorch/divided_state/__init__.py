"""State that is divided: each rank holds a part.

::

    sharded          the optimizer's: each rank updates the parameters it owns, and sends them
    └── trials       whether an optimizer can be divided, tried on a few small parameters
    fully_shard      weights, gradients and state, by PyTorch's fully_shard
"""
