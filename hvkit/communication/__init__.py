"""What ranks send each other, over ``hvkit.transport``; docs/architecture.md has a table of it.

::

    group                  the ranks that do something together: all, or some
    division               divides all ranks into such groups
    collectives            Python objects between ranks; errors that all ranks raise together
    large_objects          large objects of all ranks to rank 0 and back, for checkpoints
    allreduce              hvkit.allreduce: arrays of any library
    graph_values           which values a framework only traces
    mailboxes              opens the mailbox of a run, by MPI or TCP
    exchanges              the collectives that compressions and strategies use, as data
    encoding               hvkit's own messages as bytes; reading them runs no code
"""
