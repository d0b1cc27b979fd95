"""The plain, whole model on every rank for a while: for ``generate``, which calls parts of it.

Hugging Face's ``model.generate()`` calls an encoder alone, and keeps keys and values of all layers
from call to call. Ranks that hold parts of layers, or some of them, cannot do that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvkit.communication.traffic import count
from hvkit.frameworks.pytorch.model_parallel.kept_results import HOOKS
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import StageLinks
from hvkit.frameworks.pytorch.model_parallel.slices import Slicing
from hvkit.watch.calls import call

_GENERATE = "generate"


class WholeModel:
    """Lets ``generate`` of a model in a mesh work inside ``hvkit.settled``.

    Args:
        model: before anything of it is replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain = [(m, type(m), vars(m).get("forward")) for m in model.modules()]
        self._settled = False
        self._parts: tuple[Mapping[str, Slicing], Mapping[str, int], StageLinks] | None = None
        if callable(getattr(type(model), _GENERATE, None)) and _GENERATE not in vars(model):
            vars(model)[_GENERATE] = self._generate

    def divided(
        self, slicings: Mapping[str, Slicing], holder: Mapping[str, int], links: StageLinks
    ) -> None:
        """Note who holds what.

        Args:
            slicings: of this rank's parameters, by name.
            holder: by parameter and buffer, the rank along the pipeline that holds it.
            links: to the ranks of the pipeline.
        """
        self._parts = slicings, holder, links
        self._tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        names = {id(t): name for name, t in self._tensors.items()}
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
        run: Any = getattr(type(self._model), _GENERATE)
        if self._settled and self._parts is not None:
            with self._whole():
                return run(self._model, *args, **kwargs)
        return run(self._model, *args, **kwargs)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Be the plain model with all of its weights for a while; a collective."""
        weights = self._weights()
        whole = {
            name: nn.Parameter(weights[name], t.requires_grad)
            if isinstance(t, nn.Parameter)
            else weights[name]
            for name, t in self._tensors.items()
        }
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
                vars(module)[which][key] = whole[name]
            for module in self._model.modules():
                if isinstance(module, nn.RNNBase):
                    module._init_flat_weights()
            yield
        finally:
            for module, kind, attributes in before:
                module.__class__ = kind
                vars(module).clear()
                vars(module).update(attributes)

    @torch.no_grad()
    def _weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the model, by name; a collective."""
        assert self._parts is not None
        slicings, holder, links = self._parts
        rank, found = dist.get_rank(links.group), {}
        with call("generate()"), links.waiting():
            for name, source in holder.items():
                t = self._tensors[name].detach()
                if source == rank:
                    t = slicings.get(name, Slicing()).joined(t, "weights").clone()
                else:
                    t = torch.empty(t.shape, dtype=t.dtype, device=links.device)
                if len(links.ranks) > 1:
                    count("weights", t.nbytes if source == rank else 0)
                    dist.broadcast(t, links.ranks[source], group=links.group)
                found[name] = t
        return found


def _is_of_mesh(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(("hvkit.", "torch.distributed."))
