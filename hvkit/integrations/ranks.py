"""What the trainers' integrations share: ranks by batch, parts of loaders, whole states."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch.utils.data import DataLoader

import hvkit
from hvkit.data.pytorch_loader import LoaderLike
from hvkit.errors import HvkitError
from hvkit.mesh import Mesh, position_in
from hvkit.strategies import FullyShard

# The base of a mixin, which calls what the class beside it has.
Mixin: Any = object

# The versions with which the tests of trainers pass.
OLDEST = {
    "lightning": "2.4",
    "pytorch_lightning": "2.4",
    "lightning_fabric": "2.4",
    "transformers": "5.0",
    "accelerate": "1.1",
}


class BatchRanks:
    """Numbers over all ranks, where those of a mesh that train with one batch count once."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.batch, self.batches, self.counts = hvkit.rank(), hvkit.size(), True
        if mesh is not None:
            position = position_in(mesh)
            self.batch, self.batches = position.batch, position.batches
            self.counts = position.along("pipeline") == position.along("tensor") == 0

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the ranks, one for each batch, in the order of the batches."""
        parts = hvkit.allgather((self.batch, self.counts, tensor.detach().cpu()))
        counted = sorted((batch, i) for i, (batch, counts, _) in enumerate(parts) if counts)
        return [parts[i][2].to(tensor.device) for _, i in counted]

    def gather_state(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """``gather``, as metrics of torchmetrics call it."""
        return self.gather(tensor)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all batches, in the order of the samples that ``hvkit.shard`` has divided."""
        parts = self.gather(tensor if tensor.ndim else tensor[None])
        whole = min(map(len, parts))
        first = torch.stack([part[:whole] for part in parts], 1).flatten(0, 1)
        return torch.cat([first, *(part[whole:] for part in parts)])

    def reduce(self, value: Any, op: str) -> Any:
        """A tensor's, or a number's, ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` of the ranks."""
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if op in ("mean", "sum") and self.batches < hvkit.size():
            tensor = tensor if self.counts else torch.zeros_like(tensor)
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        summed: Any = "sum" if op == "mean" else op
        reduced: Any = hvkit.allreduce(tensor.detach(), op=summed)
        reduced = reduced / self.batches if op == "mean" else reduced
        return reduced if isinstance(value, torch.Tensor) else reduced.item()


def check_use(package: str, options: Mapping[str, Any]) -> None:
    """Refuse an old version of a trainer's package, and options ``hvkit.distribute`` lacks.

    Raises:
        HvkitError: For the version.
        TypeError: For an option.
    """
    version, oldest = str(sys.modules[package].__version__), OLDEST[package]
    if Version(version) < Version(oldest):
        raise HvkitError(
            f"hvkit needs {package} {oldest} or newer, and {package} {version} is installed: "
            "upgrade it"
        )
    inspect.signature(hvkit.distribute).bind(None, None, **options)


def part_of(
    loader: Any, options: Mapping[str, Any], *, exact: bool = False, equal: bool = False
) -> Any:
    """This rank's part of a loader for training, or an exact one; other objects stay.

    Ranks that gather weights in each pass need equally many batches, as do loops that are ``equal``
    on all ranks; in a mesh also of equal sizes. If exact parts have others, or a rank has none,
    every rank evaluates all of the samples: the loader is the same.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader, LoaderLike):
        return loader
    mesh = options.get("mesh")
    part = hvkit.shard(loader, exact=exact, mesh=mesh)
    lengths = set(hvkit.allgather(sized_length(part))) if exact else set()
    if 0 in lengths:
        return loader
    if exact and (equal or isinstance(options.get("strategy"), FullyShard)):
        part = part if len(lengths) == 1 and None not in lengths else loader
    if exact and mesh is not None and (position := position_in(mesh)).mesh.shard > 1:
        part = part if sized_length(loader.dataset, 1) % position.batches == 0 else loader
    return part


def sized_length(data: Any, default: int | None = None) -> Any:
    try:
        return len(data)
    except TypeError:  # a stream, or a loader of one
        return default


def accumulating(options: Mapping[str, Any], batches: int) -> dict[str, Any]:
    """Options for steps of up to so many batches, of which the last is announced in its pass."""
    # PyTorch adds each pass's mean there.
    needless = isinstance(options.get("strategy"), FullyShard)
    return dict(options) if needless else {"accumulate": batches, **options}


def divides_weights(options: Mapping[str, Any]) -> bool:
    """Whether ranks hold parts of the weights under these options of ``hvkit.distribute``."""
    return options.get("mesh") is not None or isinstance(options.get("strategy"), FullyShard)


def whole_state(thing: Any, trained: Sequence[Any]) -> dict[str, Any]:
    """The whole state dict of a model or an optimizer on rank 0, empty on others; a collective.

    ``trained`` is what ``hvkit.distribute`` got; with nothing, every rank has the state.
    """
    if hvkit.size() == 1 or not trained:
        return thing.state_dict()  # type: ignore[no-any-return]
    with hvkit.settled(*trained):
        return copied(thing.state_dict()) if hvkit.is_main() else {}


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone() if state.device.type == "cpu" else state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def same_weights(module: torch.nn.Module) -> None:
    """Give a model that no optimizer trains the weights of rank 0; a collective."""
    state: Any = hvkit.broadcast(module.state_dict() if hvkit.is_main() else None)
    if not hvkit.is_main():
        module.load_state_dict(state)
