"""Gradients, averaged while ``backward()`` computes them.

::

    reducer                averages gradients during backward() or before the step; the order of it
    ├── backward_passes    hooks: which gradients are final; the passes of a step, passes in passes
    ├── buckets            tensors that carry many gradients
    ├── bucket_layout      which gradients travel together, for parameters as they are now
    ├── compressed_buckets those that travel compressed, and what the compression keeps
    ├── sparse             gradients of few rows
    ├── step_report        which gradients each rank has and what it changed; steps and rates
    ├── loss_counts        whether ranks' losses are means over different numbers
    ├── script_hooks       the script's own hooks on parameters, run on averaged gradients
    └── nonfinite          gradients that are NaN or infinite
"""
