"""What only Keras on TensorFlow needs: an update is a part of a graph, and so are collectives.

::

    averaged_updates   averaging in optimizer.apply; updates that all ranks leave out
    └── averager       the mean of a list of gradients; the rows of each step, and sums over ranks
        └── sparse     row-sparse gradients
    local_weights      ends rounds of strategies that agree on weights, by ``hvkit.sync.rounds``;
                       exchanges weights with a parameter server after each update
    ├── local_updates  code around an optimizer's updates; variables that it updates together, and
    │                  functions of their values
    └── weight_vectors a model's weights as vectors, by number
    gather             tensors over all ranks, for the functions that scripts call
    wire               Horovod's collectives on tensors; waits counted in graphs, refusals
    ops                operations for compressions
"""
