"""Everything that depends on the framework: PyTorch or Keras 3 on TensorFlow.

::

    hvkit.distribute         picks the framework's adapter and calls its steps
    ├── adapter              those steps as a protocol; a record of what was distributed
    ├── pytorch/             averages gradients before loss.backward() returns
    └── keras/               averages gradients inside optimizer.apply
    allgather                hvkit.allgather: objects of all ranks, tensors with gradients
        both use
        ├── buffers          what forward passes learn: do ranks differ, and is it averaged?
        ├── gradient_chunks  how many messages carry gradients or weights
        ├── nonfinite        the sentence about gradients that are NaN or infinite
        ├── settled          hvkit.settled, for strategies whose ranks train alone
        ├── weight_exchange  the weights on the parameter server, as one rank sees them
        │   └── weight_server    the server, a thread on rank 0
        ├── parameter_shares which parts of the parameters each rank owns
        └── fingerprints     whether all ranks hold the same tensors

Scaling and warm-up of the learning rate are computed in ``hvkit.learning_rate``; the adapters
apply them. TensorFlow and PyTorch are imported only when the script's model is theirs.
"""
