"""Stages of a model on successive ranks, under a training loop that does not know of them.

::

    stages              a forward without weights; divides the model: cuts, stages of parameters
    staged_forward      runs one stage through the model's own forward
    microbatches        divides a batch, joins outputs, and compares some with the whole batch's
    pipelined_model     ``model(x)`` runs all forward, ``backward()`` all backward
    torch_schedules     the same in the order of one of PyTorch's schedules
    deferred_outputs    what ``model(x)`` returns then: tensors whose values ``backward()`` computes
"""
