"""The core: rounds, local weights, comparisons of ranks. It imports no framework.

::

    port                   the steps of hvkit.distribute as a protocol; what was distributed;
                           what ports do alike
    rounds                 ends rounds of strategies that agree on weights
    └── agreements         exchanges of an agreement, a strategy's state, comparisons of ranks
    compression_state      the state of a compression: residuals
    local_weights          local weights, as a port shows them, around each step; hvkit.settled
    parameter_server_client  exchanges a model's weights with a parameter server after each step
    parameter_server_thread  the server: a thread on rank 0
    fingerprints           whether all ranks hold the same weights and buffers
"""
