"""Runs a rank's part of a model through the model's own forward.

A rank runs the forward from its beginning. Modules before its stage have no weights here, and give
shapes only, which are computed once. Where the stage begins, a module returns the outputs of the
stage before instead of its own. Where the stage ends, an exception leaves the forward.
"""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.cut_places import ModuleCut, ModuleOutput
from hvkit.frameworks.pytorch.model_parallel.meta_device import OnMeta, explaining_meta, uncompiled
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import MicroBatch
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import DryRun, ModuleStages
from hvkit.frameworks.pytorch.model_parallel.rank_groups import SharedNumbers
from hvkit.frameworks.pytorch.model_parallel.side_outputs import (
    HOOKS,
    SideOutputs,
    undoing_side_effects,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.activations import gathered
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    call_key,
    structure_of,
    tensors_in,
    with_tensors,
)

# The message with the structure of side outputs has a multiple of so many bytes.
_PACKED = 1024


class StageEnd(BaseException):
    """Leaves a forward at the end of a stage; not an ``Exception``, which models catch."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class StagedForward:
    """A model whose forward runs one stage at a time; it replaces ``forward`` of modules.

    Parameters of other ranks' stages are on the meta device. ``seeded`` is called when random
    numbers begin with a seed that all stages share.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: ModuleStages,
        found: DryRun,
        device: torch.device,
        seeded: Callable[[], None],
    ) -> None:
        self._forward = model.forward
        self.side_outputs = SideOutputs(model, found.side_outputs)
        # The side outputs of earlier stages.
        self._earlier_outputs: list[Any] | None = None
        # By cut, the module, and the hook that ends a stage.
        self._end_hooks: list[tuple[nn.Module, int]] = []
        self._stages = stages
        self._device = device
        self._stage = 0
        # The output of the module at the cut before, and what skips over that.
        self._received: Sequence[torch.Tensor] = ()
        self._received_skips: dict[ModuleOutput, torch.Tensor] = {}
        # By module, the tensors of its output, which skip over a cut.
        self._skips: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        # Around the part of a forward before a stage: shapes only, and no compiled code.
        self._before, self._mode = ExitStack(), OnMeta(device)
        self._shapes: dict[Hashable, Any] = {}
        self._running = False
        modules = self._modules = dict(model.named_modules())
        for name, module in modules.items():
            # The script calls the model itself, which may have parameters of any stage.
            if name and any(p.is_meta for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(functools.partial(self._refuse_outside, name))
        # Modules that read values.
        self._reading = {modules[name] for name in found.reading}
        self._numbers = SharedNumbers(device, _on_one_rank(model, stages), seeded)
        for number, cut in enumerate(stages.cuts):
            self._cut(modules[cut.name], number, cut)
        skips = {each.module for cut in stages.cuts for each in cut.skips}
        for name in self._shape_only(found, skips):
            self._replace_by_shapes(modules[name], stages.of_module[name])
        for name in skips:
            self._pass_on(name, modules[name])

    def run(
        self, stage: int, received: Sequence[torch.Tensor], batch: MicroBatch, seed: int
    ) -> Any:
        """Run one of this rank's stages for a micro-batch, from the output of the stage before.

        Returns the inputs of the next stage; of the last one, the model's result and its side
        outputs. All stages get the same ``seed``.
        """
        self._stage, self._running = stage, True
        self._skips.clear()
        self._receive(stage, received)
        for module, hook in self._end_hooks:  # after hooks that the script has added since
            cast(Any, module._forward_hooks).move_to_end(hook)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._numbers.drawn(seed))
                if stage:
                    self._before, self._mode = ExitStack(), OnMeta(self._device)
                    stack.enter_context(self._before)
                    self._before.enter_context(uncompiled())
                    self._before.enter_context(self._mode)
                result = self._forward(*batch.args, **batch.kwargs)
                output = result, gathered(self.side_outputs.tree())
        except StageEnd as end:
            output = end.output
        except RuntimeError as error:
            if not stage or "meta" not in str(error).lower():
                raise
            raise self._not_passed_on(stage) from error
        finally:
            self._running = False
            self.side_outputs.restore()
        if any(t.is_meta for t in tensors_in(output)):
            raise self._not_passed_on(stage)
        return output

    def _receive(self, stage: int, received: Sequence[torch.Tensor]) -> None:
        """Divide the inputs of a stage into outputs of modules and side outputs."""
        self._received = []
        self._received_skips = {}
        self._earlier_outputs = None
        self.side_outputs.begin()
        if not stage:
            return
        cut = self._stages.cuts[stage - 1]
        first = cut.aliases.count(None)
        end = first + len(cut.skips)
        self._received = received[:first]
        self._received_skips = dict(zip(cut.skips, received[first:end], strict=True))
        if self.has_side_outputs:
            structure = pickle.loads(bytes(received[end].tolist()))
            self._earlier_outputs = with_tensors(structure, received[end + 1 :])
            # Code before the stage may add them up.
            self.side_outputs.put_tree(self._earlier_outputs)

    def _side_outputs_for_next(self) -> list[torch.Tensor]:
        """The side outputs at the end of a stage: their structure, and their tensors."""
        if not self.has_side_outputs:
            return []
        tree = self.side_outputs.tree()
        text = pickle.dumps(structure_of(tree))
        # The same length for all micro-batches.
        text = text.ljust(-(-len(text) // _PACKED) * _PACKED, b"\0")
        structure = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        return [structure, *tensors_in(gathered(tree))]

    @property
    def has_side_outputs(self) -> bool:
        """Whether any call of the forward may keep or remove side outputs."""
        return bool(self.side_outputs.paths)

    def side_outputs_in(self, output: Any) -> int:
        """How many tensors in the output of the last stage are side outputs."""
        return len(tensors_in(output[1]))

    def result_of(self, output: Any) -> Any:
        """The model's result from the output of the last stage; puts side outputs into place."""
        self.side_outputs.begin()
        self.side_outputs.put_tree(output[1])
        return output[0]

    def _not_passed_on(self, stage: int) -> ValueError:
        return ValueError(
            f"stage {stage} uses something of an earlier stage that the cut after "
            f"{self._stages.cuts[stage - 1]} does not pass on, such as an attribute in which a "
            "module keeps a result: choose other cuts with stages=[...]"
        )

    def _refuse_outside(self, name: str, module: nn.Module, args: Any) -> None:
        if not self._running:
            raise ValueError(
                f"{name} was called outside of the model's forward, but another rank of the "
                "pipeline has its weights: call the model itself, with an argument that chooses "
                "what its forward does; inside `with hvkit.settled(model):`, which every rank "
                "enters, model.generate() has the whole model"
            )

    def _cut(self, module: nn.Module, number: int, cut: ModuleCut) -> None:
        """Leave the forward after this module in stage ``number``, and enter it in the next."""
        original = module.forward
        # Modules inside pass on outputs, too, which hooks of the script may take there.
        inside = any(each.module.startswith(f"{cut.name}.") for each in cut.skips)
        # A tensor that it passes on may come from another stage.
        passes_on = inside or any(i is not None for i in cut.aliases)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._running:  # a checkpoint computes it again
                return original(*args, **kwargs)
            if self._stage == number + 1:
                if inside:
                    original(*args, **kwargs)
                self._enter_stage()
                new, skips = iter(self._received), self._received_skips
                tensors = [next(new) if i is None else skips[cut.skips[i]] for i in cut.aliases]
                return with_tensors(cut.structure, tensors)
            if self._stage > number + 1 and not passes_on:
                return self._shape_of(module, original, args, kwargs)
            return original(*args, **kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._running and self._stage == number + 1 and self._earlier_outputs is not None:
                self.side_outputs.put_tree(self._earlier_outputs)
            if self._running and self._stage == number:
                if missing := [each.module for each in cut.skips if not self._skips[each.module]]:
                    raise ValueError(
                        f"the cut after {cut} passes on a result of {missing[0]}, which the "
                        "model's first call made, and this one, in training or in evaluation, does "
                        "not: choose other cuts with stages=[...]"
                    )
                skips = [self._skips[each.module][each.number] for each in cut.skips]
                pairs = zip(tensors_in(output), cut.aliases, strict=True)
                # Ranks of the tensor axis may have parts of the sequence, and send the whole.
                passed = gathered([*(t for t, i in pairs if i is None), *skips])
                raise StageEnd([*passed, *self._side_outputs_for_next()])

        module.forward = forward
        self._end_hooks.append((module, module.register_forward_hook(leave).id))

    def _enter_stage(self) -> None:
        """Begin to compute values; a mode that the forward itself has entered stays."""
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if modes[-1:] == [self._mode]:
            self._before.close()
        else:
            self._mode.active = False

    def _pass_on(self, name: str, module: nn.Module) -> None:
        """Note the output of a module for the cut that it skips; replace it in a later stage."""

        def exchange(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._running:
                return None
            tensors = self._skips[name] = tensors_in(output)
            received = [each for each in self._received_skips if each.module == name]
            for each in received:
                tensors[each.number] = self._received_skips[each]
            return with_tensors(structure_of(output), tensors) if received else None

        module.register_forward_hook(exchange)

    def _shape_only(self, found: DryRun, skips: Collection[str]) -> list[str]:
        """The modules of which later stages need the shapes only."""
        modules = self._modules
        cuts = {modules[cut.name] for cut in self._stages.cuts}
        sending = {modules[name] for name in skips}
        return [
            name
            for name in found.shape_only
            if cuts.isdisjoint(inside := set(modules[name].modules()))
            and sending.isdisjoint(inside - {modules[name]})
        ]

    def _replace_by_shapes(self, module: nn.Module, stage: int) -> None:
        """Let a module compute shapes only in the stages after its own."""
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running and self._stage > stage:
                return self._shape_of(module, original, args, kwargs)
            return original(*args, **kwargs)

        module.forward = forward

    def _shape_of(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The output of a module of an earlier stage, on the meta device."""
        key = (id(module), module.training, call_key(args, kwargs))
        if key not in self._shapes:
            buffers = {name: b.clone() for name, b in module.named_buffers()}
            # Its hooks already run around the call of the stage.
            changed = {"forward": original, **{name: OrderedDict() for name in HOOKS}}
            patched = {name: vars(module)[name] for name in changed}
            vars(module).update(changed)
            mode, reads = self._mode, not self._reading.isdisjoint(module.modules())
            before, mode.look = mode.look, _ignore if reads else mode.look
            try:
                with torch.no_grad(), explaining_meta(), undoing_side_effects(module):
                    # Real values, such as masks, stay: the module may read them.
                    output = torch.func.functional_call(module, buffers, args, kwargs)
                    self._shapes[key] = tree_map_only(torch.Tensor, lambda t: t.to("meta"), output)
            finally:
                vars(module).update(patched)
                mode.look = before
        return self._shapes[key]


def _ignore(error: Exception) -> None:
    """Accept a read of a value on which no shape of the output depends."""


def _on_one_rank(model: nn.Module, stages: ModuleStages) -> list[nn.Module]:
    """The largest modules without a cut inside."""
    cuts = {model.get_submodule(cut.name) for cut in stages.cuts}

    def within(module: nn.Module) -> list[nn.Module]:
        if module is not model and cuts.isdisjoint(set(module.modules()) - {module}):
            return [module]
        return [found for child in module.children() for found in within(child)]

    return list(dict.fromkeys(within(model)))
