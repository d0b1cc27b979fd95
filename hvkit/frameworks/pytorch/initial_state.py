"""Copies the first rank's weights and optimizer state to every rank, bit for bit.

The first of all ranks is rank 0, as messages call it; a group has another.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.communication import collectives
from hvkit.communication.encoding import copied_bytes
from hvkit.frameworks.pytorch.optimizers import parameters_of
from hvkit.runtime import Group

# How many bytes of tensors travel together; bounds the memory for copies of them.
_RUN = 64 << 20


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Overwrite tensors with the first rank's, in place; a collective. They travel as bytes."""
    run: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            with torch.no_grad():
                tensor.copy_(_from_first(tensor.detach(), group))
        elif tensor.numel():  # an empty one has no bytes to view as another dtype
            run.append(own_elements(tensor.detach()))
            size += run[-1].nbytes
            if size > _RUN:
                _broadcast_run(run, group)
                run, size = [], 0
    _broadcast_run(run, group)


def own_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions that ``expand`` made, to which nothing can write."""
    return tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]


def _broadcast_run(targets: list[torch.Tensor], group: Group) -> None:
    if not targets:
        return
    sent = np.concatenate([copied_bytes(each) for each in targets])
    received = collectives.broadcast_state(sent, group)
    start = 0
    for target in targets:
        piece = torch.from_numpy(received[start : start + target.nbytes].copy())
        target.copy_(piece.view(target.dtype).view(target.shape))
        start += target.nbytes


def broadcast_optimizer(optimizer: Optimizer, group: Group) -> None:
    """Replace the optimizer's state and its groups' options with the first rank's; a collective.

    Only the first may hold state, from a checkpoint; its objects do not change.
    """
    parameters = parameters_of(optimizer)
    number = {p: i for i, p in enumerate(parameters)}
    options = [
        {key: value for key, value in each.items() if key != "params"}
        for each in optimizer.param_groups
    ]
    state = {number.get(key, key): value for key, value in optimizer.state.items()}
    options, state = _from_first((options, state), group)
    if group.rank == 0:
        return
    for param_group, received in zip(optimizer.param_groups, options, strict=True):
        for key, value in received.items():
            param_group[key] = _replaced(param_group.get(key), value)
    optimizer.state.clear()
    for key, value in state.items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value


# The types in the pickle of a NumPy scalar: a script may compute a learning rate with NumPy. It
# stays a NumPy scalar, since an update rounds otherwise with a float of Python, of more bits.
_NUMPY_SCALARS: list[Any] = [
    np.float64(0).__reduce__()[0],
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdg"},
]


def _from_first(value: Any, group: Group) -> Any:
    """The first rank's tensors and plain values; a collective. Reading them runs no code."""
    buffer, problem = io.BytesIO(), None
    if group.rank == 0:
        torch.save(value, buffer)
    payload = collectives.from_rank(group.first, buffer.getvalue(), group)
    if group.rank:
        try:
            with torch.serialization.safe_globals(_NUMPY_SCALARS):
                value = torch.load(io.BytesIO(payload), _on_this_gpu, weights_only=True)
        except pickle.UnpicklingError as error:
            problem = TypeError(
                "the optimizer's state or options hold an object that is no tensor, number, text, "
                f"list or dict ({_first_line(error)}): keep it in an attribute of the optimizer"
            )
    collectives.raise_together(problem, group=group)
    return value


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])


def _on_this_gpu(storage: Any, location: str) -> Any:
    """Where to put rank 0's storage: on this rank's GPU unless it is in host memory."""
    on_gpu = location.startswith("cuda")
    return storage.cuda(torch.cuda.current_device()) if on_gpu else storage


def _replaced(value: Any, received: Any) -> Any:
    """Rank 0's value, copied into this rank's tensor if there is one: the script may have it."""
    both = isinstance(value, torch.Tensor) and isinstance(received, torch.Tensor)
    if not both or (value.shape, value.dtype) != (received.shape, received.dtype):
        return received
    with torch.no_grad():
        return value.copy_(received)


def move_to(
    device: torch.device,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    parameters: Iterable[torch.Tensor],
) -> None:
    """Move a model on another GPU, its optimizers' state and parameters to this rank's GPU.

    A script that calls ``model.to("cuda")`` before ``distribute`` puts all ranks' models on the
    first.
    """
    elsewhere = {p.device for p in model.parameters() if p.is_cuda} - {device}
    if len(elsewhere) != 1 or any(not p.is_cuda for p in model.parameters()):
        return
    model.to(device)
    for p in parameters:
        if p.device in elsewhere:
            p.data = p.data.to(device)
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    values[key] = value.to(device)
