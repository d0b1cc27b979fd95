"""Building a model that fits no rank; imports no framework until it is called."""

from __future__ import annotations

from contextlib import AbstractContextManager


def deferred_init() -> AbstractContextManager[None]:
    """Build a PyTorch model that does not fit into this rank's memory.

    ::

        with hvkit.deferred_init():
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = hvkit.distribute(model, optimizer, mesh=hvkit.Mesh(pipeline=2))

    Inside the block parameters and buffers get shapes, but neither memory nor values: they are on
    PyTorch's meta device. ``hvkit.distribute`` makes those that this rank needs, with the values
    that the plain constructor would have given. In one process it gives the plain model.

    Initialise, load, convert and move the model inside the block: what changes values after it and
    before ``hvkit.distribute`` has no effect, and is refused where hvkit can notice it. Values that
    depend on no random numbers can be read in the block (``.item()``, ``if tensor > 0``), and are
    computed then. Until the model is made, PyTorch's random numbers are others than without the
    block; afterwards they go on as without it, unless the script drew some in between.

    Raises:
        ValueError: in the block, where the script reads random values, draws with a
            ``torch.Generator`` of its own or on another device than the CPU, changes a real tensor
            by a deferred one, or uses a tensor on the meta device that is not of this block.
    """
    from hvkit.frameworks.pytorch.model_parallel import deferred_init as pytorch

    return pytorch.deferred_init()
