"""Keras 3 on TensorFlow, PyTorch and JAX; TensorFlow is imported only where Keras runs on it.

On TensorFlow, gradients are averaged inside the optimizer's own update::

    port                   the steps of distribute
    ├── averaged_updates   averaging in optimizer.apply, accumulation
    ├── gradients/         the mean of a list of gradients (averager), weighted by samples
    ├── weights/           for local weights: rounds, the parameter server
    ├── graph_shares       sends the variables that a rank owns
    ├── batch_norm         means of moving statistics
    ├── checks             do all ranks hold the same weights, and different data?
    ├── graph_refusals     updates inside XLA and tf.distribute
    ├── traced_steps       steps of fit in the timeline of a run
    └── collectives/       collectives in eager code and in graphs; used by most of the above

On PyTorch, PyTorch's port does most of it::

    on_pytorch             the steps of distribute
    ├── as_pytorch         models and optimizers as PyTorch's port takes them
    └── pytorch_sample_counts  sums over ranks for loss_means
    pytorch_loop           the steps where optimizers are PyTorch's, in a loop of the script

On JAX, XLA averages inside Keras's compiled steps::

    on_jax                 the steps of distribute: where variables are
    ├── jax_batches        one batch of all ranks in each step
    └── jax_refusals       models and optimizers that would train apart

The first two use::

    initial_state          copies rank 0's weights and optimizer state
    adapted                copies what rank 0's layers have learnt from data: vocabularies
    optimizers             what hvkit has to know of Keras's optimizers
    learning_rate          scaling and warm-up in optimizer.apply
    loss_means             losses in fit that are means over all ranks' samples, tokens, weights
    loss_scale             which steps ranks skip together, and each one's part of a loss scale
    fit                    fit and evaluate on all ranks
    ├── metric_results     the results of metrics over all ranks
    └── callbacks          all ranks stop together, only rank 0 writes files
    pipeline/              models of which each rank of a pipeline holds some layers
    refusals               updates by other optimizers, and options that suit none
    comparisons            which variables must be the same on all ranks, and are they?
    buffers                do ranks differ in what else forward passes learn?
    divided_state          optimizers whose state is divided
    ├── partial_state      placeholders for the state of weights of other ranks
    ├── sharded            each rank updates the variables it owns
    └── trials             an optimizer of a user's own, tried on a few small variables
    synchronised_norm      batch norm over the batches of all ranks
    backends               what differs between the backends
"""
