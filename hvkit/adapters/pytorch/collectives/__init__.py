"""Collectives on PyTorch's tensors.

::

    wire                   tensors to the other ranks and back
    ops                    operations for compressions
"""
