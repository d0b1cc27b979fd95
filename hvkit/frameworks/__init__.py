"""What depends on the framework, each behind the protocol ``hvkit.sync.port.Port``.

::

    pytorch/       averages gradients before loss.backward() returns
    keras/         Keras 3: on TensorFlow it averages inside optimizer.apply, on PyTorch as above
    jax/           arrays of all ranks, into whose compiled functions XLA puts the collectives

Each of them is imported only when the script's model is its own.

A new framework offers:

1. a ``Port`` (``hvkit.sync.port``), which averages gradients for the strategies that do;
2. for strategies that exchange weights: the model's ``Weights``, and a ``LocalOptimizer`` for
   each optimizer, or a ``HookedOptimizer`` if its steps are plain calls of Python
   (``hvkit.sync.local_weights``);
3. for strategies that agree on weights in rounds: a ``RoundSync`` (``hvkit.sync.rounds``);
4. a ``Framework`` in ``hvkit/registry.py``, and what it supports in ``hvkit/capabilities.py``.

Whatever else takes the framework's objects chooses by their type: ``hvkit/models.py``,
``data/shard.py``, ``checkpoint/part_types.py`` and ``monitor/monitor.py``.
"""
