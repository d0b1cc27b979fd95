"""Carries bytes between ranks, by Horovod, MPI or TCP. ``hvkit.runtime`` starts it.

::

    engines                the one place that imports Horovod's collectives
    jax_engine             the same for JAX without Horovod: starts JAX's processes, and sums and
                           sends arrays in host memory by MPI or TCP
    mailbox                messages between two ranks; the one place that imports mpi4py
    traffic                hvkit.traffic: bytes sent, by purpose
"""
