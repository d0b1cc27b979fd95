"""Weights, on which ranks agree every so many steps, or which they exchange with a server.

::

    local_weights    ends rounds of strategies that agree on weights, by ``hvkit.sync.rounds``;
                     exchanges weights with a parameter server after each update
    updates          code around an optimizer's updates; variables that it updates together, and
                     functions of their values
    variables        a model's weights as vectors, by number
"""
