"""Models whose parts lie on several ranks.

::

    deferred_init          records how a model's tensors are made, on the meta device
    └── recipe             makes those that a rank needs, with the values of one process
        └── recorded_calls what it consists of
"""
