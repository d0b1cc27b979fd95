"""Horovod's own names on Keras 3, where Horovod was written for Keras 2.

Horovod's Python calls these modules, by the patches in ``hvkit/build/patches``. Scripts import
``horovod``, and none of this.

::

    keras_optimizer    DistributedOptimizer: averages in the updates of optimizers of Keras 3
    keras_2            names of Keras 2 that scripts use, and that Keras 3 has changed
    h5_files           models from HDF5 files, with the optimizer's state
    settings           the variables that ranks set
"""

started_by_hvkit = False
"""Whether hvkit starts Horovod now: its users write names of Keras 3."""
