"""Collectives in eager code and in graphs of TensorFlow.

::

    graph_collectives      waits counted in graphs, sums in 16 bits
    gather                 tensors over all ranks, for the functions that scripts call
    wire                   tensors to the other ranks and back; in eager code by name
    ops                    operations for compressions
"""
