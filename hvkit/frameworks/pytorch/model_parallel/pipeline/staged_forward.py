"""Runs a rank's part of a model through the model's own forward.

A rank runs the forward from its beginning. What comes before its stage has no weights here, so it
gives shapes only; modules that were called before need not even compute those again. Where the
stage begins, the results of the stage before take the place of what a module returns. Where it
ends, the forward is left.
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

from hvkit.frameworks.pytorch.model_parallel.cut_places import CutPlace
from hvkit.frameworks.pytorch.model_parallel.dry_run import DryRun
from hvkit.frameworks.pytorch.model_parallel.kept_results import (
    HOOKS,
    KeptResults,
    left_as_before,
)
from hvkit.frameworks.pytorch.model_parallel.meta_device import OnMeta, explaining_meta, uncompiled
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import MicroBatch
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import Stages
from hvkit.frameworks.pytorch.model_parallel.tensor.activations import gathered
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    call_key,
    structure_of,
    tensors_in,
    with_tensors,
)

# The structure of what is kept travels in multiples of so many bytes.
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
        stages: of it.
        found: by the dry run.
        device: of this rank's parameters.
        seeded: called when random numbers begin with a seed that all stages share.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        found: DryRun,
        device: torch.device,
        seeded: Callable[[], None],
    ) -> None:
        self._forward = model.forward
        # What stages pass on to the script.
        self._kept = KeptResults(model, found.kept) if found.kept else None
        # What earlier stages have kept.
        self._given: list[Any] | None = None
        # By cut, its last hook on the module.
        self._leaving: list[tuple[nn.Module, int]] = []
        self._stages = stages
        self._device = device
        self._stage = 0
        self._received: Sequence[torch.Tensor] = ()
        # By module, the tensors of its result that another stage needs beside a cut.
        self._beside: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self._before: _Before | None = None
        self._shapes: dict[Hashable, Any] = {}
        self._running = False
        modules = self._modules = dict(model.named_modules())
        for name, module in modules.items():
            # The model itself is called from outside, and may hold parameters of any stage.
            if name and any(p.is_meta for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(functools.partial(self._refuse_outside, name))
        # What looks at values, and what holds such a module.
        self._looking = {modules[name] for name in found.looking}
        self._numbers = SharedNumbers(device, _on_one_rank(model, stages), seeded)
        for number, cut in enumerate(stages.cuts):
            self._cut(modules[cut.module], number, cut)
        beside = {each.module for cut in stages.cuts for each in cut.beside}
        for name in self._skipped(found, beside):
            self._skip(modules[name], stages.of_module[name])
        for name in beside:
            self._pass_on(name, modules[name])

    def run(
        self, stage: int, received: Sequence[torch.Tensor], batch: MicroBatch, seed: int
    ) -> Any:
        """What a stage gives for a micro-batch: the arguments of the next one, or the result.

        Args:
            stage: one of this rank's.
            received: the tensors that the stage before has given; none for the first stage.
            batch: the arguments of the model.
            seed: of the random numbers that all stages draw alike.

        Raises:
            ValueError: the forward needs more of earlier stages than what they have given.
        """
        self._stage, self._running = stage, True
        self._beside.clear()
        self._receive(stage, received)
        for module, hook in self._leaving:  # after those that the script has added since
            cast(Any, module._forward_hooks).move_to_end(hook)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._numbers.drawn(seed))
                if stage:
                    self._before = _Before(self._device)
                    stack.enter_context(self._before)
                output = self._forward(*batch.args, **batch.kwargs)
                if self._kept is not None:
                    output = output, gathered(self._kept.tree())
        except StageEnd as end:
            output = end.output
        except (RuntimeError, NotImplementedError) as error:
            if not stage or "meta" not in str(error).lower():
                raise
            raise self._not_passed_on(stage) from error
        finally:
            self._running = False
            if self._kept is not None:
                self._kept.restore()
        if any(t.is_meta for t in tensors_in(output)):
            raise self._not_passed_on(stage)
        return output

    def _receive(self, stage: int, received: Sequence[torch.Tensor]) -> None:
        """Divide what a stage is given into results of modules, and what is kept."""
        self._received = received
        if self._kept is None:
            return
        self._kept.begin()
        self._given = None
        if stage:
            cut = self._stages.cuts[stage - 1]
            count = cut.slots.count(None) + len(cut.beside)
            structure = pickle.loads(bytes(received[count].tolist()))
            self._received = received[:count]
            self._given = with_tensors(structure, received[count + 1 :])
            self._kept.put_tree(self._given)  # code before the stage may add them up

    def _kept_for_next(self) -> list[torch.Tensor]:
        """What is kept at the end of a stage: its structure, and its tensors."""
        if self._kept is None:
            return []
        tree = self._kept.tree()
        text = pickle.dumps(structure_of(tree))
        # Of a length that is the same for all micro-batches.
        text = text.ljust(-(-len(text) // _PACKED) * _PACKED, b"\0")
        structure = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        return [structure, *tensors_in(gathered(tree))]

    @property
    def keeps(self) -> bool:
        """Whether the forward may keep something, or take it away, in any call."""
        return self._kept is not None

    def filled(self) -> tuple[bool, ...]:
        """Which of the lists that keep something hold any: a forward may clear them."""
        return () if self._kept is None else self._kept.filled()

    def kept_in(self, output: Any) -> int:
        """How many tensors of what the last stage gives the model keeps, and does not return."""
        return 0 if self._kept is None else len(tensors_in(output[1]))

    def shown(self, output: Any) -> Any:
        """The model's result, from what the last stage gives; what is kept is put in its place."""
        if self._kept is None:
            return output
        self._kept.begin()
        self._kept.put_tree(output[1])
        return output[0]

    def _not_passed_on(self, stage: int) -> ValueError:
        return ValueError(
            f"stage {stage} uses something of an earlier stage that the cut after "
            f"{self._stages.cuts[stage - 1]} does not pass on, such as an attribute in which a "
            "module keeps a result: choose other cuts with stages=[...]"
        )

    def _refuse_outside(self, name: str, module: nn.Module, args: Any) -> None:
        """Before a call of a module of another rank's stage."""
        if not self._running:
            raise ValueError(
                f"{name} was called outside of the model's forward, but another rank of the "
                "pipeline has its weights: call the model itself, with an argument that chooses "
                "what its forward does; inside `with hvkit.settled(model):`, which every rank "
                "enters, model.generate() has the whole model"
            )

    def _cut(self, module: nn.Module, number: int, cut: CutPlace) -> None:
        """Leave the forward after this module in stage ``number``, and enter it in the next."""
        own = module.forward
        # Others that it calls pass on results, too, which hooks of the script may take there.
        inside = any(each.module.startswith(f"{cut.module}.") for each in cut.beside)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._running:  # a checkpoint computes it again
                return own(*args, **kwargs)
            if self._stage == number + 1:
                assert self._before is not None
                if inside:
                    own(*args, **kwargs)
                self._before.end()
                given = self._received[len(self._received) - len(cut.beside) :]
                new = iter(self._received)
                tensors = [next(new) if slot is None else given[slot] for slot in cut.slots]
                return with_tensors(cut.structure, tensors)
            # A tensor that it passes on may have arrived from another stage.
            passes_on = inside or any(slot is not None for slot in cut.slots)
            if self._stage > number + 1 and not passes_on:
                return self._shape_of(module, own, args, kwargs)
            return own(*args, **kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._running and self._stage == number + 1 and self._given is not None:
                assert self._kept is not None
                self._kept.put_tree(self._given)
            if self._running and self._stage == number:
                if missing := [each.module for each in cut.beside if not self._beside[each.module]]:
                    raise ValueError(
                        f"the cut after {cut} passes on a result of {missing[0]}, which the "
                        "model's first call made, and this one, in training or in evaluation, does "
                        "not: choose other cuts with stages=[...]"
                    )
                beside = [self._beside[each.module][each.number] for each in cut.beside]
                pairs = zip(tensors_in(output), cut.slots, strict=True)
                # Ranks of the tensor axis may have parts of the sequence, and send the whole.
                passed = gathered([*(t for t, slot in pairs if slot is None), *beside])
                raise StageEnd([*passed, *self._kept_for_next()])

        module.forward = forward
        self._leaving.append((module, module.register_forward_hook(leave).id))

    def _pass_on(self, name: str, module: nn.Module) -> None:
        """Note the result of this module where a stage ends, and receive it where one begins."""

        def exchange(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._running:
                return None
            tensors = tensors_in(output)
            arrived = self._arrived(name)
            for number, received in arrived.items():
                tensors[number] = received
            self._beside[name] = tensors
            return with_tensors(structure_of(output), tensors) if arrived else None

        module.register_forward_hook(exchange)

    def _arrived(self, name: str) -> dict[int, torch.Tensor]:
        """The tensors of a module's result that this stage has received, by number."""
        if not self._stage:
            return {}
        cut = self._stages.cuts[self._stage - 1]
        given = self._received[len(self._received) - len(cut.beside) :]
        pairs = zip(cut.beside, given, strict=True)
        return {each.number: t for each, t in pairs if each.module == name}

    def _skipped(self, found: DryRun, beside: Collection[str]) -> list[str]:
        """The modules of which shapes are enough for later stages."""
        modules = self._modules
        cuts = {modules[cut.module] for cut in self._stages.cuts}
        given = {modules[name] for name in beside}
        return [
            name
            for name in found.closed
            if cuts.isdisjoint(inside := set(modules[name].modules()))
            and given.isdisjoint(inside - {modules[name]})
        ]

    def _skip(self, module: nn.Module, stage: int) -> None:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running and self._stage > stage:
                return self._shape_of(module, own, args, kwargs)
            return own(*args, **kwargs)

        module.forward = forward

    def _shape_of(self, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a module of an earlier stage returns, on the meta device."""
        key = (id(module), module.training, call_key(args, kwargs))
        if key not in self._shapes:
            buffers = {name: b.clone() for name, b in module.named_buffers()}
            # Its hooks run around the call that wants the shapes.
            changed = {"forward": own, **{name: OrderedDict() for name in HOOKS}}
            patched = {name: vars(module)[name] for name in changed}
            vars(module).update(changed)
            assert self._before is not None
            mode, looks = self._before.mode, not self._looking.isdisjoint(module.modules())
            before, mode.look = mode.look, _nothing if looks else self._before.mode.look
            try:
                with torch.no_grad(), explaining_meta(), left_as_before(module):
                    # Values that are there, such as masks, stay: it may look at them.
                    output = torch.func.functional_call(module, buffers, args, kwargs)
                    self._shapes[key] = tree_map_only(torch.Tensor, lambda t: t.to("meta"), output)
            finally:
                vars(module).update(patched)
                mode.look = before
        return self._shapes[key]


def _nothing(error: Exception) -> None:
    """What is looked at changes no shape of the result."""


def _on_one_rank(model: nn.Module, stages: Stages) -> list[nn.Module]:
    """The largest modules without a cut inside."""
    cuts = {model.get_submodule(cut.module) for cut in stages.cuts}
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
    """Surrounds what a forward computes before a stage: shapes only, and nothing compiled."""

    def __init__(self, device: torch.device) -> None:
        self.mode = OnMeta(device)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(self.mode)

    def end(self) -> None:
        """The stage begins. A mode that the forward itself has entered since then stays."""
        if _modes()[-1:] == [self.mode]:
            self._stack.close()
        else:
            self.mode.active = False

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class SharedNumbers:
    """Random numbers that all stages of a pipeline draw alike, such as noise that a forward adds.

    Each rank runs the model's forward, but computes only its own stage. What the forward itself
    draws must be the same on all of them, although modules, whose dropout draws too, compute on one
    rank only. So a pass begins with a seed that the ranks share, and each call of a module takes
    one number of that stream, from which its own numbers follow. Gradient checkpointing gets the
    same ones again.

    Args:
        device: of the model; the numbers cover it, the CPU, and Python's ``random``.
        modules: those that compute on one rank only, none inside another.
        seeded: called when a pass has got its seed.
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
        # What was before each call that is running: a module may be called for its shapes inside.
        self._before: list[list[torch.Tensor]] = []
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            # Also after an error: checkpoints leave modules by one.
            module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def drawn(self, seed: int) -> Iterator[None]:
        """Surrounds a pass; afterwards the rank's own generators go on."""
        own = self._states()
        of_python = random.getstate()
        self._seed(seed)
        random.seed(seed)
        self._seeded()
        try:
            yield
        finally:
            self._set(own)
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
