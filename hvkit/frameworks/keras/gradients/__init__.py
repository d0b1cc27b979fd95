"""Gradients, averaged inside the optimizer's update.

::

    averager               the mean of a list of gradients
    ├── sample_counts      sums over ranks for loss_means, and the rows of each step
    └── sparse             row-sparse gradients
    nonfinite              gradients that are NaN or infinite
"""
