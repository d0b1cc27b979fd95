"""Weights, which ranks that train alone agree on every so many steps, or exchange with a server.

::

    rounds                 ends rounds of strategies that agree on weights
    ├── round_groups       counts an optimizer's updates, by the variables it updates
    └── agreements         agreements, in the update or beside training
    parameter_server       exchanges weights with the server after each update
    weight_keeper          what both share: weights as vectors, agreed and each rank's own
"""
