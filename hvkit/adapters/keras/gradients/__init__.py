"""Gradients, averaged inside the optimizer's update.

::

    averager               the mean of a list of gradients
    └── sparse             row-sparse gradients
"""
