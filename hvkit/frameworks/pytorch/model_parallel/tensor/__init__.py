"""Layers of which each rank of a tensor group holds a part.

::

    plan              which layers can be divided, and why the others cannot
    ├── chosen_layers those of a vocabulary, and those that a user names
    ├── experts       those in parameters of three dimensions, tried with random numbers
    ├── streams       activations between pairs, and where the sequence can be divided
    └── flow          one forward on the meta device, followed operation by operation
        └── rules     where an operation leaves the divided dimension
    layers            parts of weights, and a forward that uses them
    ├── placements    which part of a parameter each rank holds
    ├── activations   what the user's code does between a column and a row layer
    └── tensor_group  sums, gathers and a loss, with their gradients; and the same dropout
"""
