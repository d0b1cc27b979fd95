"""What carries bytes between ranks: Horovod, MPI, TCP. ``hvkit.runtime`` starts it.

::

    engines                the one place that imports Horovod's collectives
    jax_engine             the same for JAX, whose processes have their own collectives on arrays
    host_collectives       what JAX's ranks use for hvkit's messages: MPI, or TCP
    mailbox                messages between two ranks; the one place that imports mpi4py
    traffic                hvkit.traffic: bytes sent, by purpose
"""
