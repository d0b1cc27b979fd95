"""Objects, arrays and messages between ranks, over ``hvkit.transport``.

docs/architecture.md has a table of everything that ranks send.

::

    collectives            Python objects between ranks; errors that all ranks raise together;
                           large objects, one rank after the other; the mailbox of a run
    allreduce              hvkit.allreduce: arrays of any library
    exchanges              the collectives that compressions and strategies use, as data
    encoding               hvkit's own messages as bytes; reading them runs no code
"""
