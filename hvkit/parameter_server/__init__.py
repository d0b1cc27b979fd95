"""Weights that all ranks exchange with a server on rank 0, as messages of mpi4py.

::

    worker         exchanges a model's weights with the server after each step
    └── client     the weights on the server, as one rank sees them
        └── server a thread on rank 0

The rule for who may go on, and what the server does with a change, are in
``hvkit.strategies.parameter_server``.
"""
