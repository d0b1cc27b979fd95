"""What ranks send each other, and how many bytes; docs/architecture.md has a table of it.

::

    group                  the ranks that do something together: all, or some
    division               divides all ranks into such groups
    collectives            Python objects between ranks; errors that all ranks raise together
    large_objects          large objects of all ranks to rank 0 and back, for checkpoints
    allreduce              hvkit.allreduce: arrays of any library
    graph_values           which values a framework only traces
    mailbox                messages that a rank polls for, for the parameter server
    tcp_mailbox            the same without MPI
    mailboxes              opens the mailbox of a run, one of the two
    exchanges              the collectives that compressions and strategies use, as data
    engines                the one place that imports Horovod's collectives
    jax_engine             the same for JAX, whose processes have their own collectives on arrays
    host_collectives       what JAX's ranks use for hvkit's messages: MPI, or TCP
    encoding               hvkit's own messages as bytes; reading them runs no code
    point_to_point         messages between two ranks; the one place that imports mpi4py
    traffic                hvkit.traffic: bytes sent, by purpose
"""
