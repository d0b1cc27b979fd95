"""Splitting data among ranks: ``hvkit.shard``.

::

    shard                   shard(): recognises the kind of the data, calls the module for it
    ├── arrays              NumPy arrays, tensors, and containers of them
    ├── pytorch_loader      DataLoader: loaders of a rank's part, and with dynamic=True
    │   ├── samplers            one rank's steps of an epoch, from the user's sampler
    │   │   └── sampler_kinds       how a loader makes batches, and when samplers draw numbers
    │   ├── pytorch_datasets    Dataset and IterableDataset
    │   └── pytorch_workers     how workers start where MPI uses InfiniBand
    ├── tfdata              tf.data pipelines
    │   ├── tfdata_batches      finds out how a pipeline was batched
    │   └── tfdata_files        files that a pipeline writes: one for each rank
    ├── keras_pydataset     keras.utils.PyDataset
    ├── grain_dataset       Grain's MapDataset
    ├── parquet             pyarrow.dataset of Parquet files, by row groups
    │   └── arrow_columns       arrays from columns of lists and tensors
    ├── rank_samples        the arithmetic all of them use: which samples of a step are this
    │                       rank's, seeds, and a loader's position
    └── random_generators   random numbers that begin in the same state on every rank

To shard another kind of data, write a module that returns one rank's part and the facts that must
be equal on all ranks, and call it in ``shard.shard_for``.
"""

from hvkit.data.shard import shard

__all__ = ["shard"]
