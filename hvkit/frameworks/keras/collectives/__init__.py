"""Collectives in eager code and in graphs of TensorFlow.

::

    graph_collectives      waits counted in graphs, sums in 16 bits
    gather                 tensors of all ranks, with a backward pass
    in_graphs              hvkit.allreduce, average and any_rank in graphs
    named_collectives      in eager code, each a small graph with a name of its own
    wire                   tensors to the other ranks and back
    ops                    operations for compressions
"""
