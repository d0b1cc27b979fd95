"""PyTorch: gradients are averaged when ``loss.backward()`` returns.

::

    port                   the steps of distribute
    ├── modules            several modules as one; parameters of modules that were left out
    ├── initial_state      copies rank 0's weights and optimizer state
    ├── gradients/         averages gradients while backward() computes them (reducer)
    ├── local_weights      parameters as vectors, and optimizers that count their steps
    ├── divided_state/     each rank holds a part: sharded optimizers, fully_shard
    ├── model_parallel/    models whose parts lie on several ranks
    ├── checks             do all ranks hold the same weights, rates and gradients?
    ├── fingerprints       of tensors, for checks
    ├── batch_norm         statistics over ranks; averaged ones travel with the gradients
    ├── buffers            what else forward passes learn: means, and differences
    ├── step_hooks         calls what hvkit does around optimizer.step(); closures, new parameters
    ├── learning_rate      scaling and warm-up inside optimizer.step()
    ├── optimizers         parent classes, wrappers, GradScaler: optimizers that step unusually
    ├── traced_steps       steps and backward passes in the timeline of a run
    ├── refusals           other wrappers, torch.distributed, what cannot be divided
    └── collectives/       tensors to the other ranks and back; operations for compressions
"""

from hvkit.frameworks.pytorch.port import PyTorchPort

__all__ = ["PyTorchPort"]
