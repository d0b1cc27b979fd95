"""Keras models of which each rank of a pipeline holds some layers.

::

    port              the steps of distribute on TensorFlow; averages in updates
    pytorch_port      the same on PyTorch; averages in backward passes
    └── divided_model    what is the same on both: divides, and replaces the model's methods
        ├── deferred_build   makes the weights of this rank's stage only
        ├── layer_graph      where a model can be cut, what it costs, which stage holds what
        ├── pipelined_model  runs all stages for a model's call, and for the gradients of it
        │   ├── stage            runs the layers of one stage
        │   ├── stage_messages   sends tensors from stage to stage
        │   ├── penalties        the regularisation of all stages
        │   └── tensors          what differs between backends: recording, gradients, variables
        │       └── tensorflow_tensors, pytorch_tensors
        ├── model_parts      gives up the layers of other stages, gathers and loads the whole
        └── optimizer_parts  updates this rank's layers, clips by the norm of all stages
    refusals          what cannot be in a pipeline, with the reason
"""
