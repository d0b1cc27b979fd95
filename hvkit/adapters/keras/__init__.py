"""Keras 3 on TensorFlow: gradients are averaged inside the optimizer's own update."""

from hvkit.adapters.keras.adapter import KerasAdapter

__all__ = ["KerasAdapter"]
