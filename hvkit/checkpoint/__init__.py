"""Saving a training run, and resuming it on the same or another number of ranks.

::

    checkpoint          Checkpoint: save() and restore(), called on every rank
    ├── part            what saves one object into one file: the base class, small JSON states
    │   ├── pytorch     PyTorch models, optimizers and anything else with a state dict
    │   └── keras       Keras models, optimizers and callbacks
    ├── strategies      what the models' strategies keep, and the weights that they show in a save
    ├── progress        where training continues: epoch, step, batches, extras
    ├── ranks           what differs between ranks: random states, layer statistics
    ├── resume          loads a checkpoint on all ranks
    ├── newest          finds the newest complete one, for a restart on all hosts
    ├── store           a directory of checkpoints, rank 0's or in memory: lock, folders
    ├── manifests       what each folder holds, with the sha256 of its files
    ├── replicas        copies in the memory of other hosts, for restarts: which hosts
    ├── transfer        sends a copy to another host, and keeps it there
    ├── choice          which part saves which object
    ├── writing         writes the files, at once or in a thread
    └── fit_callback    saves from inside Keras's fit

To save another kind of object, write a subclass of ``part.Part`` and choose it in
``choice.part_for``.
"""

from hvkit.checkpoint.checkpoint import Checkpoint
from hvkit.checkpoint.progress import Progress

__all__ = ["Checkpoint", "Progress"]
