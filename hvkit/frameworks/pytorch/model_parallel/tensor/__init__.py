"""Layers of which each rank of a tensor group holds a part.

::

    plan              which linear layers can be divided, and why the others cannot
    └── flow          one forward on the meta device, followed operation by operation
        └── rules     where an operation leaves the divided dimension
    layers            parts of weights, and a forward that uses them
    ├── placements    which part of a parameter each rank holds
    ├── activations   what the user's code does between a column and a row layer
    ├── attention     nn.MultiheadAttention with this rank's heads
    └── random_numbers    the same dropout on all ranks that hold the same activations
"""
