"""The plain, whole model on every rank for a while: for ``generate``, which calls parts of it.

Hugging Face's ``model.generate()`` calls an encoder alone, and keeps keys and values of all layers
from call to call. Ranks that hold parts of layers, or some of them, cannot do that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from hvkit.frameworks.pytorch.model_parallel.model_state import ModelState
from hvkit.frameworks.pytorch.model_parallel.side_outputs import HOOKS


class WholeModel:
    """Lets ``generate`` of a model in a mesh work inside ``hvkit.settled``.

    Args:
        model: before anything of it is replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain = [(m, type(m), vars(m).get("forward")) for m in model.modules()]
        self._settled = False
        self._state: ModelState | None = None
        if callable(getattr(type(model), "generate", None)) and "generate" not in vars(model):
            vars(model)["generate"] = self._generate

    def divided(self, state: ModelState) -> None:
        """Note who holds what."""
        self._state = state
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        names = {id(t): name for name, t in tensors}
        self._slots = [
            (module, kind, key, names[id(t)])
            for module in self._model.modules()
            for kind in ("_parameters", "_buffers")
            for key, t in vars(module)[kind].items()
            if t is not None
        ]

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Surrounds what happens inside ``hvkit.settled``."""
        self._settled = True
        try:
            yield
        finally:
            self._settled = False

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        run = cast(Any, type(self._model)).generate
        if self._settled and self._state is not None:
            with self._whole():
                return run(self._model, *args, **kwargs)
        return run(self._model, *args, **kwargs)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Be the plain model with all of its weights for a while; a collective."""
        assert self._state is not None
        full = self._state.full_everywhere(self._model)
        before = [(m, type(m), dict(vars(m))) for m in self._model.modules()]
        try:
            for module, kind, forward in self._plain:
                own = vars(module)
                module.__class__ = kind
                own.pop("forward", None)
                own.update({} if forward is None else {"forward": forward})
                for name in ("_parameters", "_buffers"):
                    own[name] = dict(own[name])
                for name in HOOKS:
                    own[name] = type(own[name])(
                        (key, hook) for key, hook in own[name].items() if not _is_of_mesh(hook)
                    )
            for module, which, key, name in self._slots:
                vars(module)[which][key] = full[name]
            for module in self._model.modules():
                if isinstance(module, nn.RNNBase):
                    module._init_flat_weights()
            yield
        finally:
            for module, kind, attributes in before:
                module.__class__ = kind
                vars(module).clear()
                vars(module).update(attributes)


def _is_of_mesh(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(("hvkit.", "torch.distributed."))
