"""One sub-package a framework, behind one small protocol.

An adapter is made for one call of :func:`hvkit.distribute`. TensorFlow and PyTorch are imported
only when the model handed in is theirs.
"""
