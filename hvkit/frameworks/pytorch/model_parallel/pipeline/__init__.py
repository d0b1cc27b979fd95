"""Stages of a model on successive ranks, under a training loop that does not know of them.

::

    stages              which stage holds what
    staged_forward      runs one stage through the model's own forward
    microbatches        divides a batch, and joins results
    result_comparison   compares with the whole model, and micro-batches with the whole batch
    stage_gradients     where autograd enters and leaves a stage
    stage_messages      the ``Channel`` by ``torch.distributed``
    pipelined_model     ``model(x)`` runs all forward, ``backward()`` all backward
    torch_schedules     the same in the order of one of PyTorch's schedules
    deferred_outputs    what ``model(x)`` gives then: tensors that wait for ``backward()``
"""
