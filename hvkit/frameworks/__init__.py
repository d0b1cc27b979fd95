"""What depends on the framework, each behind the protocol ``hvkit.sync.port.Port``.

::

    pytorch/       averages gradients before loss.backward() returns
    keras/         Keras 3: on TensorFlow it averages inside optimizer.apply, on PyTorch as above

TensorFlow and PyTorch are imported only when the script's model is theirs.
"""
