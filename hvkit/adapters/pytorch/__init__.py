"""PyTorch: gradients are averaged when ``loss.backward()`` returns."""

from hvkit.adapters.pytorch.adapter import PyTorchAdapter

__all__ = ["PyTorchAdapter"]
