"""Weights, on which ranks agree every so many steps, or which they exchange with a server.

::

    rounds                 ends rounds of strategies that agree on weights, by ``hvkit.sync.rounds``
    └── agreements         agreements: in eager code, in graphs, or in threads
    parameter_server       exchanges weights after each update, by ``hvkit.parameter_server.worker``
    around_updates         code around an optimizer's updates
    updated_variables      variables that an optimizer updates together; functions of their values
    state_variables        what the strategy keeps of each weight
    variables              a model's weights as vectors, by number
"""
