"""What ranks send each other, and how many bytes that is.

::

    collectives            Python objects between ranks; errors that all ranks raise together
    allreduce              hvkit.allreduce: arrays of any library
    messages               messages that a rank looks for, for the parameter server
    exchanges              the collectives that compressions and strategies use, as data
    engines                the one place that imports Horovod
    point_to_point         messages between two ranks; the one place that imports mpi4py
    traffic                hvkit.traffic: bytes sent, by purpose
"""
