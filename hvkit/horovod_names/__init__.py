"""What Horovod's own names do where Horovod was written for Keras 2.

Horovod's Python calls these modules, by the patches in ``hvkit/build/patches``. Scripts import
``horovod``, and none of this.

::

    keras_optimizer    DistributedOptimizer: averages in the updates of optimizers of Keras 3
    keras_2            what scripts use that Keras 3 has under another name
    h5_files           models from HDF5 files, with the optimizer's state
    settings           the variables that ranks set
"""

started_by_hvkit = False
"""Whether it is hvkit that starts Horovod now, whose users write names of Keras 3."""
