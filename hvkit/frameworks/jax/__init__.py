"""JAX: arrays that belong to all ranks, and compiled functions into which XLA puts the collectives.

::

    port      the steps of ``hvkit.distribute``, and what it refuses
    arrays    models as trees of arrays, and where on the ranks' devices these are
    batches   ``hvkit.batch``: the ranks' batches as one array
    updates   Optax transformations that keep divided states and weights divided
"""

from hvkit.frameworks.jax.port import JaxPort as JaxPort
