"""Models that are divided among the ranks.

::

    tensor_plan                which linear layers can be divided, and why the others cannot
    └── tensor_flow            one forward on the meta device, followed operation by operation
        └── tensor_rules       where an operation leaves the divided dimension
    tensor_layers              parts of weights, and a forward that uses them
    ├── placements             which part of a parameter each rank holds
    ├── divided_activations    what the user's code does between a column and a row layer
    ├── tensor_attention       nn.MultiheadAttention with this rank's heads
    └── random_numbers         the same dropout on all ranks that hold the same activations
"""
