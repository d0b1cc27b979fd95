"""Weights, which ranks that train alone agree on every so many steps, or exchange with a server.

::

    rounds                 ends rounds of strategies that agree on weights
    ├── update_counts      counts an optimizer's updates; decides when a round ends
    └── agreements         agreements, in the update or beside training
    parameter_server       exchanges weights with the server after each update
    weight_keeper          what both share: weights as vectors, agreed and each rank's own
"""
