"""Tensor parallelism: layers that the ranks of a tensor group divide.

::

    plan                   which layers can be divided, and why the others cannot
    ├── chosen_layers      layers of a vocabulary, and those named by ``plan=``
    ├── experts            experts in parameters of three dimensions, tried with random numbers
    ├── sequence_parallel  activations between pairs that are divided along the sequence
    └── linear_trace       follows the outputs of linear layers through one forward
        └── propagation_rules  how an operation propagates the divided dimension
    divided_layers         the forwards of divided layers
    ├── divided_tensors    which part of a tensor each rank holds; collectives with gradients
    └── activations        operations of the user's code on divided activations
"""
