"""Runs a rank's part of a model through the model's own forward.

A rank runs the forward from its beginning. Modules before its stage have no weights here, and give
shapes only, which are computed once. Where the stage begins, a module returns the outputs of the
stage before instead of its own. Where the stage ends, an exception leaves the forward.
"""

from __future__ import annotations

import functools
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.cut_places import ModuleCut
from hvkit.frameworks.pytorch.model_parallel.dry_run import DryRun
from hvkit.frameworks.pytorch.model_parallel.meta_device import OnMeta, explaining_meta, uncompiled
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import MicroBatch
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import ModuleStages
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
_LARGEST_SEED = 2**62


class StageEnd(BaseException):
    """Leaves the model's forward at the end of a stage; not an ``Exception``, which models catch.

    Args:
        output: of the stage.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class StagedForward:
    """A model whose forward runs one stage at a time.

    Args:
        model: parameters of other ranks' stages are on the meta device. Its modules' ``forward``
            are replaced on the instances.
        stages: of the model.
        found: by the dry run.
        device: of this rank's parameters.
        seeded: called when random numbers begin with a seed that all stages share.
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
        self._side_outputs = SideOutputs(model, found.side_outputs)
        # The side outputs of earlier stages.
        self._earlier_outputs: list[Any] | None = None
        # By cut, the module, and the hook that ends a stage.
        self._end_hooks: list[tuple[nn.Module, int]] = []
        self._stages = stages
        self._device = device
        self._stage = 0
        self._received: Sequence[torch.Tensor] = ()
        # By module, the tensors of its output, which skip over a cut.
        self._skips: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self._before: _Before | None = None
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
        """Run a stage for a micro-batch.

        Args:
            stage: one of this rank's.
            received: the outputs of the stage before; none for the first stage.
            batch: the arguments of the model.
            seed: of the random numbers that are the same in all stages.

        Returns:
            The inputs of the next stage; of the last one, the model's result and its side outputs.

        Raises:
            ValueError: the stage needs more of earlier stages than their outputs.
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
                    self._before = _Before(self._device)
                    stack.enter_context(self._before)
                result = self._forward(*batch.args, **batch.kwargs)
                output = result, gathered(self._side_outputs.tree())
        except StageEnd as end:
            output = end.output
        except (RuntimeError, NotImplementedError) as error:
            if not stage or "meta" not in str(error).lower():
                raise
            raise self._not_passed_on(stage) from error
        finally:
            self._running = False
            self._side_outputs.restore()
        if any(t.is_meta for t in tensors_in(output)):
            raise self._not_passed_on(stage)
        return output

    def _receive(self, stage: int, received: Sequence[torch.Tensor]) -> None:
        """Divide the inputs of a stage into outputs of modules and side outputs."""
        self._received = received
        self._side_outputs.begin()
        self._earlier_outputs = None
        if stage and self.has_side_outputs:
            cut = self._stages.cuts[stage - 1]
            count = cut.aliases.count(None) + len(cut.skips)
            structure = pickle.loads(bytes(received[count].tolist()))
            self._received = received[:count]
            self._earlier_outputs = with_tensors(structure, received[count + 1 :])
            # Code before the stage may add them up.
            self._side_outputs.put_tree(self._earlier_outputs)

    def _side_outputs_for_next(self) -> list[torch.Tensor]:
        """The side outputs at the end of a stage: their structure, and their tensors."""
        if not self.has_side_outputs:
            return []
        tree = self._side_outputs.tree()
        text = pickle.dumps(structure_of(tree))
        # The same length for all micro-batches.
        text = text.ljust(-(-len(text) // _PACKED) * _PACKED, b"\0")
        structure = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        return [structure, *tensors_in(gathered(tree))]

    @property
    def has_side_outputs(self) -> bool:
        """Whether any call of the forward may keep or remove side outputs."""
        return bool(self._side_outputs.paths)

    def filled(self) -> tuple[bool, ...]:
        """Which lists of side outputs are not empty before a forward, which may clear them."""
        return self._side_outputs.filled()

    def side_outputs_in(self, output: Any) -> int:
        """How many tensors in the output of the last stage are side outputs."""
        return len(tensors_in(output[1]))

    def result_of(self, output: Any) -> Any:
        """The model's result from the output of the last stage; puts side outputs into place."""
        self._side_outputs.begin()
        self._side_outputs.put_tree(output[1])
        return output[0]

    def _not_passed_on(self, stage: int) -> ValueError:
        return ValueError(
            f"stage {stage} uses something of an earlier stage that the cut after "
            f"{self._stages.cuts[stage - 1]} does not pass on, such as an attribute in which a "
            "module keeps a result: choose other cuts with stages=[...]"
        )

    def _refuse_outside(self, name: str, module: nn.Module, args: Any) -> None:
        """A hook before the call of a module of another rank's stage."""
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
                assert self._before is not None
                if inside:
                    original(*args, **kwargs)
                self._before.end()
                skips = self._received[len(self._received) - len(cut.skips) :]
                new = iter(self._received)
                tensors = [next(new) if i is None else skips[i] for i in cut.aliases]
                return with_tensors(cut.structure, tensors)
            if self._stage > number + 1 and not passes_on:
                return self._shape_of(module, original, args, kwargs)
            return original(*args, **kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._running and self._stage == number + 1 and self._earlier_outputs is not None:
                self._side_outputs.put_tree(self._earlier_outputs)
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

    def _pass_on(self, name: str, module: nn.Module) -> None:
        """Note the output of a module for the cut that it skips; replace it in a later stage."""

        def exchange(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._running:
                return None
            tensors = tensors_in(output)
            arrived = self._arrived(name)
            for number, received in arrived.items():
                tensors[number] = received
            self._skips[name] = tensors
            return with_tensors(structure_of(output), tensors) if arrived else None

        module.register_forward_hook(exchange)

    def _arrived(self, name: str) -> dict[int, torch.Tensor]:
        """The tensors of a module's output that this stage has received, by number."""
        if not self._stage:
            return {}
        cut = self._stages.cuts[self._stage - 1]
        skips = self._received[len(self._received) - len(cut.skips) :]
        pairs = zip(cut.skips, skips, strict=True)
        return {each.number: t for each, t in pairs if each.module == name}

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
            assert self._before is not None
            mode, reads = self._before.mode, not self._reading.isdisjoint(module.modules())
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
    found: dict[nn.Module, None] = {}

    def look_into(module: nn.Module) -> None:
        if module is not model and cuts.isdisjoint(set(module.modules()) - {module}):
            found[module] = None
        else:
            for child in module.children():
                look_into(child)

    look_into(model)
    return list(found)


# PyTorch's list of the modes that are active, the innermost last.
_modes: Callable[[], list[Any]] = _get_current_function_mode_stack


class _Before:
    """Surrounds the part of a forward before a stage: shapes only, and no compiled code."""

    def __init__(self, device: torch.device) -> None:
        self.mode = OnMeta(device)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(self.mode)

    def end(self) -> None:
        """End this where the stage begins; a mode that the forward itself has entered stays."""
        if _modes()[-1:] == [self.mode]:
            self._stack.close()
        else:
            self.mode.active = False

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class SharedNumbers:
    """Random numbers that are the same in all stages of a pipeline, such as noise in a forward.

    Each rank runs the model's forward, but computes only its own stage. The forward itself must
    draw the same numbers on all ranks, although modules, whose dropout draws too, compute on one
    rank only. So a pass begins with a seed that the ranks share, and each call of a module takes
    one number of that stream to seed its own numbers. Gradient checkpointing draws the same ones
    again.

    Args:
        device: of the model; this covers its generator, those of the CPU, and Python's ``random``.
        modules: that compute on one rank only; none is inside another.
        seeded: called when a pass has set its seed.
    """

    def __init__(
        self,
        device: torch.device,
        modules: Iterable[nn.Module],
        seeded: Callable[[], None],
    ) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._seeded = seeded
        # The states before each running call: computing shapes may call a module inside of one.
        self._before: list[list[torch.Tensor]] = []
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            # Also after an error: checkpoints leave modules by an exception.
            module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def drawn(self, seed: int) -> Iterator[None]:
        """Surrounds a pass; afterwards the rank's own generators continue."""
        states = self._states()
        of_python = random.getstate()
        self._seed(seed)
        random.seed(seed)
        self._seeded()
        try:
            yield
        finally:
            self._set(states)
            random.setstate(of_python)

    def _enter(self, module: nn.Module, args: Any) -> None:
        seed = new_seed()
        self._before.append(self._states())
        self._seed(seed)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._set(self._before.pop())

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


def new_seed() -> int:
    """A seed from this rank's generator."""
    return int(torch.randint(_LARGEST_SEED, (), device="cpu"))
