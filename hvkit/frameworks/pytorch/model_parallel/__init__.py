"""Models of which each rank of a mesh holds a part.

::

    port                  the steps of ``distribute``
    parallel_model        divides a model when its first batch comes
    parts                 gathers the whole state, and loads a part of it
    gradient_norm         the norm of the gradients of all ranks, for clipping, and overflows

    dry_run               a forward without weights: where the model can be cut, what it costs
    stages                which stage of a pipeline holds what
    staged_forward        runs one stage through the model's own forward
    microbatches          divides a batch, and joins results
    stage_messages        tensors from stage to stage
    pipeline              all stages under a training loop that does not know of them
    torch_schedules       the same in the order of one of PyTorch's schedules
    deferred_outputs      what ``model(x)`` gives then: tensors that wait for backward

    deferred_init         records how a model's tensors are made, on the meta device
    recipe                makes those that a rank needs, with the values of one process
    recorded_calls        what a recipe consists of
"""
