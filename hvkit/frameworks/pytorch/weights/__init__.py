"""Local weights, as ``hvkit.sync`` and ``hvkit.parameter_server`` need them.

::

    parameters     the parameters as vectors; hooks around an optimizer's steps
    agreements     what strategies need from the other ranks
"""
