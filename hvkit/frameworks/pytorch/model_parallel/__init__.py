"""Models of which each rank of a mesh holds a part.

::

    dry_run           a forward without weights: where the model can be cut, what it costs
    stages            which stage of a pipeline holds what
    staged_forward    runs one stage through the model's own forward
    microbatches      divides a batch, and joins results
    stage_messages    tensors from stage to stage
    pipeline          all stages under a training loop that does not know of them
    gradient_norm     the norm of the gradients of all ranks, for clipping, and overflows
    parts             gathers the whole state, and loads a part of it
    parallel_model    divides a model when its first batch comes
    port              the steps of ``distribute``
"""
