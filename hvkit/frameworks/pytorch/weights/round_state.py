"""What a strategy keeps of each parameter between rounds, and vectors of several parameters.

The strategy sees all parameters of an optimizer of one dtype as one vector. What it keeps is stored
by parameter, because several optimizers may update the same one, in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvkit.frameworks.pytorch.weights.weight_keeper import flat_copy, holds, of_one_kind, write
from hvkit.strategies.strategy import Rounds
from hvkit.sync.chunking import chunks

# What begins the names, in a checkpoint, of what agreements will add to the weights.
_DUE = "due-"


class RoundState:
    """A strategy's state of the parameters of one model, by the parameter's number.

    Args:
        strategy: what the ranks agree on.
        parameters: those of the model; more may be appended later.

    Attributes:
        due: what agreements that ran beside training will add to the weights.
    """

    def __init__(self, strategy: Rounds, parameters: Sequence[torch.Tensor]) -> None:
        self.due: dict[int, torch.Tensor] = {}
        self._strategy = strategy
        self._parameters = parameters
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def begin(self, i: int) -> None:
        """Begin with a parameter's weights, unless a checkpoint has set its state."""
        if i not in self._kept:
            self._kept[i] = self._strategy.begin(flat_copy(self._parameters[i]))

    def anchor(self, i: int) -> torch.Tensor | None:
        """The weights that the ranks have last agreed on, as a vector, if the strategy has them."""
        anchor: torch.Tensor | None = self._strategy.anchor(self._kept[i])
        return anchor

    def moved(self, i: int) -> bool:
        """Whether a parameter is not what the ranks have last agreed on."""
        anchor = self.anchor(i)
        return anchor is not None and not holds(self._parameters[i], anchor)

    def rebase(self, i: int, weights: torch.Tensor | None = None) -> None:
        """Begin a round with other weights.

        Args:
            i: the parameter's number.
            weights: a vector; None for what the parameter holds.
        """
        weights = flat_copy(self._parameters[i]) if weights is None else weights
        self._kept[i] = self._strategy.rebase(weights, self._kept[i])

    def clear(self) -> None:
        """Forget everything."""
        self.due.clear()
        self._kept.clear()

    def pieces(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of parameters of one dtype, some at a time to bound the memory for copies."""
        for kind in of_one_kind(self._parameters, numbers):
            for run in chunks([self._parameters[i].nbytes for i in kind]):
                yield [kind[at] for at in run]

    def weights(self, together: Sequence[int]) -> torch.Tensor:
        """The weights of parameters, with what is due to them, one after the other."""
        flat = {i: flat_copy(self._parameters[i]) for i in together}
        return torch.cat([flat[i] + self.due[i] if i in self.due else flat[i] for i in together])

    def kept(self, together: Sequence[int]) -> dict[str, torch.Tensor]:
        """The state of parameters, one after the other."""
        names = self._kept[together[0]].keys()
        return {name: torch.cat([self._kept[i][name] for i in together]) for name in names}

    def keep(self, together: Sequence[int], state: dict[str, torch.Tensor]) -> None:
        """Set what ``kept`` returns."""
        for name, vector in state.items():
            for i, piece in self.split(together, vector):
                self._kept[i][name] = piece

    def split(
        self, together: Sequence[int], vector: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The numbers of parameters, each with its part of a vector."""
        parameters = (self._parameters[i] for i in together)
        lengths = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        return zip(together, torch.split(vector, lengths), strict=True)

    def write(self, together: Sequence[int], vector: torch.Tensor) -> None:
        """Set parameters from a vector."""
        for i, weights in self.split(together, vector):
            write(self._parameters[i], weights)

    def add_due(self, numbers: Iterable[int]) -> None:
        """Add what is due to the weights of some parameters."""
        for i in sorted(self.due.keys() & set(numbers)):
            write(self._parameters[i], self.weights([i]))
            del self.due[i]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank."""
        return {
            f"{name}.{i}": tensor.cpu().numpy()
            for i, tensors in self._kept.items()
            for name, tensor in tensors.items()
        }

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``arrays`` returned."""
        for key, array in arrays.items():
            name, _, number = key.partition(".")
            i = int(number)
            tensor = torch.tensor(array, device=self._parameters[i].device)
            self._kept.setdefault(i, {})[name] = tensor

    def rebase_all(self) -> None:
        """Begin a round with the weights that all parameters hold."""
        for i in self._kept:
            self.rebase(i)

    def own_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank."""
        return {f"{_DUE}{i}": change.cpu().numpy() for i, change in self.due.items()}

    def load_own(self, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Set what ``own_arrays`` returned, and return the arrays that are not of it."""
        rest = {}
        for key, array in arrays.items():
            if key.startswith(_DUE):
                i = int(key.removeprefix(_DUE))
                self.due[i] = torch.tensor(array, device=self._parameters[i].device)
            else:
                rest[key] = array
        return rest
