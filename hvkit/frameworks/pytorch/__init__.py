"""PyTorch: gradients are averaged when ``loss.backward()`` returns.

::

    port                   the steps of distribute
    ├── initial_state      copies rank 0's weights and optimizer state
    ├── gradients/         averages gradients while backward() computes them
    ├── local_weights      parameters as vectors, optimizers whose steps are counted: for LocalSGD
    ├── divided_state/     each rank holds a part: sharded optimizers, fully_shard
    ├── model_parallel/    models whose parts lie on several ranks
    ├── checks             compares the ranks while they train; gradients that the script changes
    ├── fingerprints       of tensors, models and optimizers, for checks
    ├── buffers            batch norm over ranks; means and comparisons of other buffers
    ├── step_hooks         calls hvkit's functions around optimizer.step(); adds new parameters
    ├── learning_rate      scaling and warm-up inside optimizer.step(); comparing rates
    ├── optimizers         names of tensors; parent classes, wrappers, GradScaler: unusual steps
    ├── refusals           other wrappers, optimizers and modules; what cannot be divided
    ├── torch_distributed  torch.distributed between Horovod's ranks: groups, messages of pipelines
    ├── wire               Horovod's collectives on tensors; tensors as vectors
    ├── gather             tensors over all ranks, with a backward pass, for what scripts call
    └── ops                operations for compressions
"""

from hvkit.frameworks.pytorch.port import PyTorchPort

__all__ = ["PyTorchPort"]
