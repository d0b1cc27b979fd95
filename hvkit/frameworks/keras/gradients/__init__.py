"""Gradients, averaged inside the optimizer's update.

::

    averaged_updates       averaging in optimizer.apply; updates that all ranks leave out
    averager               the mean of a list of gradients; the rows of each step, and sums over
                           ranks for loss_means
    └── sparse             row-sparse gradients
"""
