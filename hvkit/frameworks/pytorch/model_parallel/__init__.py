"""Models of which each rank of a mesh holds a part.

::

    port              the steps of ``distribute``
    parallel_model    a model that is divided when its first batch comes
    rank_groups       groups of ranks, whether they get the same batches, and what they share
    division          decides from the first batch how to divide
    dry_run           a forward without weights: where the model can be cut, what it costs
    cut_places        where that is, from who uses what
    meta_device       forwards that give shapes only
    tensor_trees      nested arguments and results
    side_outputs      results that a forward keeps for the script, apart from what it returns
    forecast          what each rank will hold, and how long it will wait
    slices            this rank's slice of a parameter, and how it becomes the full tensor
    whole_parameters  slices that show a script the full tensor
    whole_model       the whole model on every rank for a while, for ``generate``
    model_state       gathers the full state, and loads a part of it
    mesh_checkpoints  what checkpoints save of it, and of what strategies keep
    shares            in pieces: what each rank writes and reads of a sharded checkpoint
    shard_axis        weights of a stage, divided by ``fully_shard``
    mesh_gradients    the norm of all ranks' gradients, overflows, and what is NaN or infinite
    deferred_init     models that no rank ever holds as a whole: records how they are made
    recipe            makes the tensors of such a model that a rank needs
    pipeline/         stages that follow each other
    tensor/           layers of which each rank has a part
"""
