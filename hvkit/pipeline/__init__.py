"""Pipelines, as every framework has them: successive stages of a model on successive ranks.

::

    stages     where a model is cut, and how many samples a micro-batch has
    gpipe      which stage computes which micro-batch when, and what it sends to whom
    channel    the messages between ranks, and how long a rank waits for them

These modules import no framework. A framework offers two things: ``StageWork``, which computes a
stage forward and backward, and a ``Channel``, which sends and receives its tensors. The ports that
do are ``frameworks/pytorch/model_parallel/pipeline`` and ``frameworks/keras/pipeline``.
"""
