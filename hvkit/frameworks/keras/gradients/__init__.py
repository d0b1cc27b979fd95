"""Gradients, averaged inside the optimizer's update.

::

    averager               the mean of a list of gradients
    └── sparse             row-sparse gradients
    nonfinite              gradients that are NaN or infinite
"""
