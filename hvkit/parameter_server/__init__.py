"""Weights that all ranks exchange with a server on rank 0, as messages of mpi4py.

::

    worker         exchanges a model's weights with the server after each step
    └── client     requests of one rank to the server
        └── server a thread on rank 0

``hvkit.strategies.parameter_server`` decides which ranks may continue, and adds their changes.
"""
