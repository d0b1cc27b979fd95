"""Saving a training run, and resuming it on the same or another number of ranks.

::

    checkpoint             Checkpoint: save() and restore(), called on every rank
    ├── saved_object       Part, which saves one object into one file; small JSON states
    │   ├── pytorch        PyTorch models, optimizers and anything else with a state dict
    │   ├── keras          Keras models, optimizers and callbacks
    │   └── jax            arrays of Flax NNX, and pytrees
    ├── object_kinds       which part saves which kind of object
    ├── strategies         the state that the models' strategies keep
    ├── progress           where training continues: epoch, step, batches, extras
    ├── rank_states        what differs between ranks: random states, layer statistics
    ├── newest_checkpoint  finds the newest complete one, for a restart on all hosts
    ├── resume             loads it on all ranks, and writes it where rank 0 lacks it
    ├── sharded            files of which each rank writes its own, for models in a mesh
    ├── joining            makes plain files of those
    ├── store              a directory of checkpoints, rank 0's or in memory: lock, folders
    ├── manifests          what each folder holds, with the sha256 of its files
    ├── replicas           copies in the memory of other hosts, for restarts
    ├── transfer           sends a copy to another host, which keeps it
    ├── writing            writes the files, at once or in a thread
    └── fit_callback       saves from inside Keras's fit

To save another kind of object, write a subclass of ``saved_object.Part`` and choose it in
``object_kinds.part_for``.
"""

from hvkit.checkpoint.checkpoint import Checkpoint
from hvkit.checkpoint.progress import Progress

__all__ = ["Checkpoint", "Progress"]
