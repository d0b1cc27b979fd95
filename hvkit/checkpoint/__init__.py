"""Saving a training run, and resuming it on the same or another number of ranks.

::

    checkpoint             Checkpoint: save() and restore(), called on every rank
    ├── saved_object       Part, which saves one object into one file; what differs between ranks
    │   ├── pytorch        PyTorch models, optimizers and anything else with a state dict
    │   ├── keras          Keras models, optimizers and callbacks
    │   └── jax            arrays of Flax NNX, and pytrees
    ├── part_types         which part saves which object; small JSON states, strategies' states
    ├── saving             writes the files: rank 0 all, or each rank of a mesh its own; joins these
    ├── store              a directory of checkpoints, rank 0's or in memory: lock, folders,
    │                      and the manifest of what each folder holds
    ├── replicas           copies in the memory of other hosts, for restarts
    ├── newest_checkpoint  finds the newest complete one on any host
    ├── resume             loads it on all ranks, and copies it if rank 0 lacks it
    └── fit_callback       saves from inside Keras's fit

A save of a PyTorch model goes through ``checkpoint``, ``part_types``, ``saved_object``,
``pytorch``, ``saving``, ``store`` and ``replicas``, in this order.

To save another kind of object, write a subclass of ``saved_object.Part`` and choose it in
``part_types.part_for``.
"""

from hvkit.checkpoint.checkpoint import Checkpoint
from hvkit.checkpoint.resume import Progress

__all__ = ["Checkpoint", "Progress"]
