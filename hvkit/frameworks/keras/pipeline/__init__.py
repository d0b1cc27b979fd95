"""Keras models of which each rank of a pipeline holds some layers.

::

    tensorflow_pipeline, pytorch_pipeline  the steps of distribute, and what the backends do
    └── divided_model    what is the same on both: divides, and replaces the model's methods
        ├── layer_graph      where a model can be cut, what it costs; runs the layers of a stage
        ├── pipelined_model  runs all stages for a model's call, and for the gradients of it
        ├── parts            weights and optimizers of a stage: updates, saves, loads, clips them
        └── tensors          what a backend has to offer; messages through the host's memory
"""
