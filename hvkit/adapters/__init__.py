"""Everything that depends on the framework: PyTorch or Keras 3 on TensorFlow.

::

    hvkit.distribute         picks the framework's adapter and calls its steps
    ├── adapter              those steps as a protocol; a record of what was distributed
    ├── pytorch/             averages gradients before loss.backward() returns
    └── keras/               averages gradients inside optimizer.apply
        both use
        ├── gradient_chunks  how many messages carry the gradients, and compression
        └── fingerprints     whether all ranks hold the same tensors

Scaling and warm-up of the learning rate are computed in ``hvkit.learning_rate``; the adapters
apply them. TensorFlow and PyTorch are imported only when the script's model is theirs.
"""
