"""Splitting data among ranks: ``hvkit.shard``.

::

    shard                   shard(): recognises the kind of the data, calls the module for it
    ├── arrays              NumPy arrays, tensors, and containers of them; Grain's MapDataset
    ├── pytorch_loader      DataLoader: loaders of a rank's part, and with dynamic=True
    │   ├── samplers            one rank's steps of an epoch, from the user's sampler
    │   │   └── sampler_properties  how a loader makes batches, and when samplers draw numbers
    │   └── pytorch_datasets    Dataset and IterableDataset
    ├── tfdata              tf.data pipelines: how they were batched, and the files that they write
    ├── keras_pydataset     keras.utils.PyDataset
    ├── parquet             pyarrow.dataset of Parquet files, by row groups
    └── rank_samples        the arithmetic all of them use: which samples of a step are this
                            rank's, seeds, and a loader's position

To shard another kind of data, write a function that returns one rank's part and the facts that
must be equal on all ranks, and add it to the table in ``shard``.
"""

from hvkit.data.shard import shard

__all__ = ["shard"]
