"""PyTorch: gradients are averaged when ``loss.backward()`` returns.

::

    adapter                the steps of distribute
    ├── initial_state      copies rank 0's weights and optimizer state
    ├── reducer            averages gradients during backward(), waits at its end
    │   ├── arrivals       hooks: which gradients are final, which buckets are full
    │   ├── bucket_layout  which gradients travel together
    │   ├── buckets        tensors that carry many gradients; sparse rows
    │   ├── compressed_buckets  those that travel compressed, and what that keeps
    │   ├── averaged_steps  each step of an optimizer follows a reduction
    │   ├── step_report    which gradients each rank has; steps and rates of the ranks
    │   └── checks         do all ranks hold the same weights, and different data?
    ├── rounds             ends rounds of strategies that agree on weights
    │   ├── agreements     agreements that run beside training
    │   ├── round_ends     do all ranks end the same round, in the same way?
    │   └── weights        a model's weights as vectors; also for the parameter server
    ├── parameter_server   exchanges weights with the server after each step
    ├── sharded            each rank updates the parameters it owns, and sends them
    ├── fully_shard        models that PyTorch's fully_shard divides
    │   └── process_group  torch.distributed between Horovod's ranks
    ├── batch_norm         statistics over ranks; averaged ones travel with the gradients
    ├── learning_rate      scaling and warm-up inside optimizer.step()
    ├── optimizers         closures, parent classes, wrappers: optimizers that step unusually
    ├── refusals           other wrappers, torch.distributed, what cannot be divided
    └── wire, ops          tensors to the other ranks and back; operations for compressions
"""

from hvkit.adapters.pytorch.adapter import PyTorchAdapter

__all__ = ["PyTorchAdapter"]
