"""Pipelines of all frameworks: successive stages of a model on successive ranks.

::

    gpipe      cuts that make stages even, the sizes of micro-batches, and the order of work: which
               stage computes which micro-batch when, and sends it where
    messages   messages between ranks, how long a rank waits for them, and equal batches

These modules import no framework. A framework offers two things: ``StageWork``, which computes a
stage forward and backward, and a ``Channel``, which sends and receives its tensors. The ports with
both are ``frameworks/pytorch/model_parallel/pipeline`` and ``frameworks/keras/pipeline``.
"""
