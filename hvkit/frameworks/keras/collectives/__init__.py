"""Collectives in eager code and in graphs of TensorFlow.

::

    gather                 tensors over all ranks, for the functions that scripts call
    wire                   Horovod's collectives on tensors; waits counted in graphs, refusals
    ops                    operations for compressions
"""
