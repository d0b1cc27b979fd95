"""Libraries whose trainers own the loop: Lightning, Transformers, Accelerate.

    __init__        what is done once a library is imported, and who distributes its objects
    ├── lightning     strategies for Trainer and Fabric
    ├── transformers  hvkit.distribute(trainer)
    ├── accelerate    hvkit.distribute(accelerator); the ranks that Accelerate finds
    └── ranks         numbers of ranks that train with one batch, parts of loaders, whole states

None of them is imported before the script does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# A package's module, and what follows its import.
_STRATEGIES = "lightning:register"
_MPI = "lightning:leave_mpi"
_AFTER = {
    "accelerate.state": "accelerate:answer_states",
    "lightning.pytorch.strategies": _STRATEGIES,
    "pytorch_lightning.strategies": _STRATEGIES,
    "lightning.fabric.strategies": _STRATEGIES,
    "lightning_fabric.strategies": _STRATEGIES,
    "lightning.fabric.plugins.environments.mpi": _MPI,
    "lightning_fabric.plugins.environments.mpi": _MPI,
}
# The modules and classes of what ``hvkit.distribute`` takes in place of a model and an optimizer.
_TRAINERS = (("transformers.trainer", "Trainer"), ("accelerate.accelerator", "Accelerator"))


def distributor(thing: object) -> Callable[[Any, Mapping[str, Any]], Any] | None:
    """The function that distributes a trainer or an accelerator; None for other objects."""
    for module, name in _TRAINERS:
        if (imported := sys.modules.get(module)) and isinstance(thing, getattr(imported, name)):
            found: Any = import_module(f"{__name__}.{module.split('.')[0]}")
            return found.distribute  # type: ignore[no-any-return]
    return None


def _follow(module: ModuleType) -> None:
    place, name = _AFTER[module.__name__].split(":")
    getattr(import_module(f"{__name__}.{place}"), name)(module)


class _Follower(MetaPathFinder):
    """Finds the modules of ``_AFTER`` as Python does, and acts when they have been run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _AFTER else None
        if spec is not None and (loader := spec.loader) is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _follow(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch_imports() -> None:
    """Act on the libraries that are imported, and on those that will be."""
    sys.meta_path.insert(0, _Follower())
    for name in _AFTER:
        if name in sys.modules:
            _follow(sys.modules[name])
