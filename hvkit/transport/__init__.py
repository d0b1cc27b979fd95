"""Carries bytes between ranks, by Horovod, MPI or TCP. ``hvkit.runtime`` starts it.

::

    engines                the one place that imports Horovod's collectives
    jax_engine             the same for JAX, whose processes have their own collectives on arrays
    host_collectives       collectives by MPI or TCP, for hvkit's messages between JAX's ranks
    mailbox                messages between two ranks; the one place that imports mpi4py
    traffic                hvkit.traffic: bytes sent, by purpose
"""
