"""Keras models on TensorFlow of which each rank of a pipeline holds some layers.

::

    port              the steps of distribute
    └── pipelined_model  runs all stages for a model's call, and for a tape's gradients
        ├── layer_graph     where a model can be cut, what it costs, which stage holds what
        ├── stage           runs the layers of one stage
        ├── stage_messages  tensors from stage to stage
        ├── deferred_build  makes the weights of this rank's stage only
        ├── model_parts     gives up the layers of other stages, gathers and loads the whole
        ├── penalties       the regularisation of all stages
        └── optimizer_parts updates this rank's layers, clips by the norm of all stages
    refusals          what cannot be in a pipeline, with the reason
"""
