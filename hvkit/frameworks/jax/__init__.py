"""JAX: arrays that belong to all ranks, and compiled functions into which XLA puts the collectives.

::

    port           the steps of ``hvkit.distribute``, and what it refuses
    arrays         models as trees of arrays; updates that keep what is divided divided
    places         where arrays are on the devices of all ranks, which stand in a mesh
    batches        ``hvkit.batch``: the ranks' batches as one array
    weight_checks  when ranks compare weights with each other
    local_weights  for LocalSGD and DiLoCo: modules of NNX that each rank trains for itself
"""

from hvkit.frameworks.jax.port import JaxPort as JaxPort
