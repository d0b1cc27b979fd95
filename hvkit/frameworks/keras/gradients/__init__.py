"""Gradients, averaged inside the optimizer's update.

::

    averaged_updates       averaging in optimizer.apply; updates that all ranks leave out
    averager               the mean of a list of gradients
    ├── sample_counts      sums over ranks for loss_means, and the rows of each step
    └── sparse             row-sparse gradients
"""
