"""Objects, arrays and messages between ranks, over ``hvkit.transport``.

The collectives that scripts call are here: ``hvkit.allreduce``, ``allgather``, ``mean``,
``average``, ``any_rank``, ``broadcast`` and ``barrier``. docs/architecture.md has a table of
everything that ranks send.

::

    collectives            broadcast, barrier; Python objects between ranks; errors that all ranks
                           raise together; large objects, one rank after the other; mailboxes
    allreduce              allreduce: arrays of any library
    tensors                allgather, mean: gradients flow back through them
    metrics                average, any_rank, EarlyStopping
    exchanges              the collectives that compressions and strategies use, as data
    encoding               hvkit's own messages as bytes; reading them runs no code
"""
