"""Gradients, averaged while ``backward()`` computes them.

::

    reducer              decides when: in backward(), or before a step
    ├── backward_passes  hooks on parameters; nested passes, accumulation; the timeline
    ├── reduction        averages: sends buckets and a report, gives the means
    ├── bucket_layout    which gradients share a bucket, which are compressed
    ├── buckets          tensors that carry many gradients; row-sparse gradients
    ├── gradient_lists   loops over all gradients, compiled in hvkit's build of Horovod
    ├── loss_counts      whether ranks' losses are means over different numbers of elements
    ├── script_hooks     the script's own hooks on parameters, run on averaged gradients
    └── nonfinite        gradients that are NaN or infinite
"""
