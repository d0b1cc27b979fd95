"""The changes to Horovod's source.

::

    horovod_edits          all of them, with their reasons
    ├── horovod_waits      those that let its threads sleep while they wait
    ├── horovod_ring       those that let it add up large tensors by a ring
    └── source_edits       what an edit is, and how edits are applied
"""
