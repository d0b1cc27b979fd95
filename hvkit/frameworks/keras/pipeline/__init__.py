"""Keras models of which each rank of a pipeline holds some layers.

::

    tensorflow_pipeline, pytorch_pipeline  the steps of distribute, and what the backends do
    └── divided_model    divides a model on both, replaces its methods, and refuses others
        ├── layer_graph      finds where a model can be cut, and runs the layers of a stage
        ├── pipelined_model  runs all stages for a model's call, and for the gradients of it
        ├── parts            weights and optimizers of a stage: updates, saves, loads, clips them
        └── tensors          operations that differ between backends; messages
"""
