"""Weights, on which ranks agree every so many steps, or which they exchange with a server.

::

    rounds                 ends rounds of strategies that agree on weights, by ``hvkit.sync.rounds``
    parameter_server       exchanges weights with a parameter server after each update
    around_updates         code around an optimizer's updates
    updated_variables      variables that an optimizer updates together; functions of their values
    variables              a model's weights as vectors, by number
"""
