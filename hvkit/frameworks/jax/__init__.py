"""JAX: arrays that belong to all ranks, and compiled functions into which XLA puts the collectives.

::

    port           the steps of ``hvkit.distribute``, and its refusals
    trees          models and optimizers as trees of arrays
    arrays         arrays of all ranks' devices, and their shardings
    batches        ``hvkit.batch``: the ranks' batches as one array; comparisons of weights
    local_weights  for LocalSGD and DiLoCo: local weights of modules of NNX

``hvkit.allreduce`` sums arrays of a single rank, by ``hvkit.transport.jax_engine``.
"""
