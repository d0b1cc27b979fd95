"""Keras 3 on TensorFlow, PyTorch and JAX; TensorFlow is imported only where Keras runs on it.

On TensorFlow, gradients are averaged inside the optimizer's own update::

    on_tensorflow          the steps of distribute
    └── tensorflow/        averaging in optimizer.apply, weighted by samples; local weights: rounds,
                           the parameter server; collectives in eager code and in graphs

On PyTorch, PyTorch's port does most of it::

    on_pytorch             the steps of distribute, also for loops with optimizers of PyTorch
    └── as_pytorch         models, optimizers and counts as PyTorch's port takes them

On JAX, XLA averages inside Keras's compiled steps::

    on_jax                 the steps of distribute, and one batch of all ranks in each step
    └── jax_refusals       models and optimizers that each rank would train on its own

The first two use::

    port                   the steps of distribute that they share
    initial_state          copies rank 0's weights, optimizer state and vocabularies
    optimizers             facts about Keras's optimizers; the learning rate of their updates; loss
                           scales, and the steps that ranks skip together
    loss_means             losses in fit that are means over all ranks' samples, tokens, weights
    └── loss_checks        names losses that it cannot correct
    fit                    fit and evaluate on all ranks; callbacks: all ranks stop together, and
                           only rank 0 writes files
    └── metric_results     the results of metrics over all ranks
    pipeline/              models of which each rank of a pipeline holds some layers
    refusals               updates by other optimizers, and options that suit none
    checks                 do all ranks hold the same weights, and different data?
    buffers                batch norm, and other variables that layers assign
    divided_state          optimizers of which each rank holds the state of some weights, and with
                           ShardedOptimizer updates only these
    backends               the differences between the backends
"""
