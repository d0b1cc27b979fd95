"""Models of which each rank of a mesh holds a part.

::

    port              the steps of ``distribute``
    parallel_model    a model that is divided when its first batch comes
    division          decides from that batch how
    dry_run           a forward without weights: where the model can be cut, what it costs
    cut_places        where that is, from who uses what
    meta_device       forwards that give shapes only
    tensor_trees      nested arguments and results
    kept_results      what a forward keeps beside what it returns, for the script
    whole_model       the whole model on every rank for a while, for ``generate``
    forecast          what each rank will hold, and how long it will wait
    parts             gathers the whole state, and loads a part of it
    whole_parameters  parts that answer a script for the whole
    part_of_whole     how parts become the whole, also for autograd
    mesh_keeper       what a strategy keeps of the parts, for checkpoints
    saved_parts       what a checkpoint saves of the parts
    shares            in pieces: what each rank writes and reads of a sharded checkpoint
    shard_axis        weights of a stage, divided by ``fully_shard``
    same_batches      whether ranks make the same calls with the same batches and weights
    shared_gradients  of parameters that several ranks hold whole
    gradient_norm     the norm of the gradients of all ranks, for clipping, and overflows
    nonfinite         gradients that are NaN or infinite on some rank
    pipeline/         stages that follow each other
    tensor/           layers of which each rank has a part
    deferred/         models that no rank ever holds as a whole
"""
