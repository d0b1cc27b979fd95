"""Models whose tensors are made after they were built: each rank makes those that it needs.

::

    deferred_init     records how they are made, on the meta device
    recipe            makes them, with the values of one process
    recorded_calls    what a recipe consists of
"""
