"""Libraries whose trainers own the loop: Lightning, Transformers, Accelerate.

    __init__          what is done once a library is imported, and who distributes its objects
    ├── lightning       strategies for Trainer and Fabric
    ├── lightning_fits  optimizers of later fits, accumulated batches, where a loader resumes
    ├── transformers    hvkit.distribute(trainer)
    ├── accelerate      hvkit.distribute(accelerator); the ranks that Accelerate finds
    └── ranks           numbers of ranks that train with one batch, parts of loaders, whole states

None of them is imported before the script does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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


class _Following(Loader):
    """Another finder's loader, after whose run ``_follow`` acts."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _follow(module)


class _Follower(MetaPathFinder):
    """Finds the modules of ``_AFTER`` as the other finders do, and acts when they have been run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path if fullname in _AFTER else ():
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Following(spec.loader)
                return spec
        return None


def watch_imports() -> None:
    """Act on the libraries that are imported, and on those that will be."""
    # A reload of hvkit has other classes of the same names.
    others = [each for each in sys.meta_path if type(each).__name__ != _Follower.__name__]
    sys.meta_path[:] = [_Follower(), *others]
    for name in _AFTER:
        if name in sys.modules:
            _follow(sys.modules[name])
