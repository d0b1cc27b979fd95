"""Weights, which ranks that train alone agree on every so many steps, or exchange with a server.

::

    rounds                 ends rounds of strategies that agree on weights
    ├── agreements         agreements that run beside training
    ├── round_ends         do all ranks end the same round, in the same way?
    └── round_state        what a strategy keeps of each parameter, as vectors
    parameter_server       exchanges weights with the server after each step
    weight_keeper          what both share: hooks around an optimizer's steps; weights as vectors
"""
