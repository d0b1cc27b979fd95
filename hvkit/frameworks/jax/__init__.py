"""JAX: arrays that belong to all ranks, and compiled functions into which XLA puts the collectives.

::

    port           the steps of ``hvkit.distribute``, and its refusals
    arrays         models as trees of arrays, their shardings over the mesh of all ranks' devices,
                   and updates whose results stay divided
    batches        ``hvkit.batch``: the ranks' batches as one array; comparisons of weights
    local_weights  for LocalSGD and DiLoCo: local weights of modules of NNX
"""

from hvkit.frameworks.jax.port import JaxPort as JaxPort
