"""Gradients, averaged while ``backward()`` computes them.

::

    reducer                averages gradients during backward(), waits at its end
    ├── arrivals           hooks: which gradients are final; passes inside passes
    ├── bucket_layout      which gradients travel together
    ├── buckets            tensors that carry many gradients; sparse rows
    ├── compressed_buckets those that travel compressed, and what the compression keeps
    ├── averaged_steps     the backward passes of a step; each step follows a reduction
    ├── changed_gradients  what the script changes after backward(), alike on all ranks or not
    ├── nonfinite          gradients that are NaN or infinite
    └── step_report        which gradients each rank has; steps and rates of the ranks
"""
