"""What ranks that train together do alike in every framework; imports none.

::

    port           the steps of hvkit.distribute as a protocol; a record of what was distributed
    shown_weights  hvkit.settled, for strategies whose ranks train alone
    fingerprints   whether all ranks hold the same tensors
    buffers        what forward passes learn: do ranks differ, and is it averaged?
    nonfinite      the sentence about gradients that are NaN or infinite
    chunking       how many messages carry gradients or weights

Scaling and warm-up of the learning rate are computed in ``hvkit.learning_rate``; the ports apply
them.
"""
