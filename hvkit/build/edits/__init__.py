"""The changes to Horovod's source.

::

    horovod_edits          all of them, with their reasons
    ├── horovod_waits      those that let its threads sleep while they wait
    ├── horovod_collectives  those that let it move large tensors in collectives of its own
    └── source_edits       what an edit is, and how edits are applied
"""
