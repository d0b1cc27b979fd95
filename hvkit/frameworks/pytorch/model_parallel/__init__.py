"""Models that the ranks of a mesh divide.

::

    port              the steps of ``distribute``
    parallel_model    replaces the model's forward, and divides the model when its first batch comes
    rank_groups       groups of ranks, and what they share: batches, weights, random numbers
    division          decides from the first batch how to divide
    cut_places        where the model can be cut, from the uses of tensors
    meta_device       forwards that compute shapes only
    tensor_trees      nested arguments and results
    side_outputs      results that a forward keeps for the script, apart from what it returns
    memory_forecast   the memory that each rank will need, and the pipeline's idle time
    slices            converts between this rank's slice of a parameter and the full tensor
    whole_parameters  slices that show a script the full tensor
    model_state       gathers the full state on rank 0, or for ``generate``, and loads parts of it
    mesh_checkpoints  saves and loads the model, its optimizers, and the strategy's state
    sharded_tensors   the format of sharded checkpoints
    mesh_gradients    all ranks' gradients: norms, overflows, NaNs, and sums of shared ones
    deferred_init     records how a model is built that no rank ever holds as a whole
    init_recording    makes the tensors of such a model that a rank needs
    pipeline/         divides the model into stages
    tensor/           divides layers
"""
