"""Collectives on PyTorch's tensors.

::

    gather                 tensors of all ranks, with a backward pass
    wire                   tensors to the other ranks and back
    ops                    operations for compressions
"""
