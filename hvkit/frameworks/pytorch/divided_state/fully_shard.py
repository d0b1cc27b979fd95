"""Models, or the stages of one along the shard axis of a mesh, that ``fully_shard`` divides.

Each rank trains on batches of its own. Weights are gathered before a layer computes and freed after
it, and each rank gets its shard of the mean gradient. Ranks along the data axis of a mesh hold the
same shards.

PyTorch makes new parameters, which are ``DTensor`` objects. An optimizer that holds the old ones
would update nothing: it gets the new ones of the same names. Loading takes whole tensors, and
saving returns them, so files are the same as for the plain model.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.errors import HvkitError, RanksDisagreeError
from hvkit.frameworks.pytorch import torch_distributed
from hvkit.frameworks.pytorch.buffers import RunningStatistics
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.gradients.reducer import watch_passes
from hvkit.frameworks.pytorch.gradients.script_hooks import HooksOnShards
from hvkit.frameworks.pytorch.learning_rate import checksum_of_rates, rates_of, refuse_other_rates
from hvkit.frameworks.pytorch.model_parallel.mesh_gradients import see_all_ranks
from hvkit.frameworks.pytorch.model_parallel.model_state import ModelState
from hvkit.frameworks.pytorch.model_parallel.slices import Slicing
from hvkit.frameworks.pytorch.model_parallel.whole_parameters import WholeParameters
from hvkit.frameworks.pytorch.optimizers import parameters_of
from hvkit.frameworks.pytorch.step_hooks import Closure, Feature, Order, UpdateHooks
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.mesh import Mesh, MeshPosition
from hvkit.runtime import all_ranks
from hvkit.strategies import FullyShard
from hvkit.transport.traffic import count, of_allgather, of_allreduce, of_alltoall
from hvkit.watch.calls import call, waiting_for_all_ranks

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )
except ImportError as error:
    raise HvkitError(
        f"hvkit.FullyShard and meshes need PyTorch 2.9 or newer, whose fully_shard lets hvkit take "
        f"part in what it sends, and PyTorch {torch.__version__} is installed: upgrade it"
    ) from error


class DividedModels(ModelState):
    """Models whose parameters are divided among the ranks, and their optimizers.

    The models have the same weights on every rank. Optimizers update the new parameters, each rank
    its part. ``statistics`` are averaged after each step.
    """

    def __init__(
        self,
        strategy: FullyShard,
        models: Sequence[nn.Module],
        optimizers: Mapping[Optimizer, UpdateHooks],
        name: str,
        statistics: RunningStatistics | None,
    ) -> None:
        torch_distributed.require_gpus_of_their_own()
        torch_distributed.start()
        models = [getattr(model, "_orig_mod", model) for model in models]  # of torch.compile
        self._name = name
        self._checks = Wire("checks")
        # The parts gathered since the last step, in order.
        self._order: list[int] = []
        self._statistics = statistics
        self._steps = itertools.count(1)
        watch_passes()
        self._losses = LossCounts()
        self._losses.look(wanted=True)
        together = nn.ModuleList(models)
        for model in models:  # nothing else keeps it
            vars(model)["_hvkit_together"] = together
        before = dict(together.named_parameters())
        self._device = next(iter(before.values())).device
        mesh = init_device_mesh(self._device.type, (runtime.size(),))
        parts = [part for model in models for part in (*_units_of(model), model)]
        reshard = strategy.reshard_after_forward
        _shard_parts(parts, mesh, name, self._order.append, reshard_after_forward=reshard)
        after = dict(together.named_parameters())
        slicings = {name: Slicing.of(p) for name, p in after.items()}
        # Each rank is a whole pipeline, and rank 0 gets the full state.
        this_rank = (runtime.rank(),)
        alone = torch_distributed.subgroup_of(this_rank, this_rank)
        links = TorchChannel(alone, self._device, name)
        super().__init__(
            together,
            dict.fromkeys([*after, *dict(together.named_buffers())], 0),
            links,
            slicings,
            MeshPosition(Mesh(data=1, shard=runtime.size()), runtime.rank()),
        )
        self._shown = WholeParameters()
        self._shown.add(together, {p: slicings[name] for name, p in after.items()})
        for optimizer, hooks in optimizers.items():
            follow(optimizer, before, after)
            self.attach(optimizer)
            hooks.add(
                Feature(
                    Order.DIVISION,
                    before=self._require_same_order,
                    after=self._average_statistics,
                    update_begins=self._shown.begin_update,
                    update_ends=self._shown.end_update,
                )
            )
        see_all_ranks()
        self._script_hooks = HooksOnShards(
            {p: before[name] for name, p in after.items()},
            lambda p: f"parameter {self._names[p].partition('.')[2]}",
            self.full_gradient,
            self.gradient_slice,
        )

    def _require_same_order(self, optimizer: Optimizer, closure: Closure | None) -> None:
        """Raise on every rank unless all have gathered the same parts in one order; a collective.

        Each part is gathered when it computes. PyTorch would put together what it is given. The
        ranks also compare learning rates and losses.
        """
        _require_gradients(optimizer)
        step = next(self._steps)
        compares = step.bit_count() == 1
        self._losses.keep()
        counts = self._losses.numbers().view(np.int64).tolist() if compares else []
        order = hash(tuple(self._order)), len(self._order)
        checksums = checksum_of_rates([optimizer]), self._losses.checksum()
        sent = torch.tensor([*order, *checksums, *counts], device="cpu")
        self._order.clear()
        with call("optimizer.step()", step, self._name):
            by_rank = self._checks.gather(sent, f"{self._name}.order").view(runtime.size(), -1)
        if compares:
            numbers = np.ascontiguousarray(by_rank[:, 4:].numpy()).view(np.float64)
            self._losses.compare(numbers, all_ranks())
        elif (by_rank[:, 3] != by_rank[0, 3]).any():
            counts = collectives.gather("optimizer.step()", self._losses.numbers().tolist())
            self._losses.compare(np.array(counts), all_ranks(), for_shapes=True)
        self._losses.begin()
        self._losses.look(wanted=(step + 1).bit_count() == 1)
        if (by_rank[:, 2] != by_rank[0, 2]).any():
            rates = collectives.gather("optimizer.step()", rates_of([optimizer], fetch=False))
            refuse_other_rates(dict(enumerate(rates)))
        if (unlike := (by_rank[:, :2] != by_rank[0, :2]).any(1)).any():
            raise RanksDisagreeError(
                f"rank {unlike.int().argmax()} has computed other layers than rank 0 since the "
                "last step, or in another order, and PyTorch has mixed up their weights: with "
                "FullyShard every rank must use the same layers in each pass"
            )

    def _average_statistics(self, optimizer: Optimizer) -> None:
        if self._statistics is not None:
            with call("optimizer.step()", key=self._name):
                self._statistics.average(all_ranks(), f"{self._name}.statistics")


def _shard_parts(
    parts: Iterable[nn.Module],
    mesh: DeviceMesh,
    name: str,
    note: Callable[[int], None],
    **options: Any,
) -> None:
    """Divide the parameters of modules, which come before those that contain them.

    Each is gathered by itself; ``note`` is called with its number whenever it is.
    """
    for number, part in enumerate(parts):
        each: Any = fully_shard(part, mesh=mesh, **options)
        gathers = functools.partial(_count_gather, note, number)
        each.set_custom_all_gather(_Counted(DefaultAllGather(), f"{name}.weights", gathers))
        scatters = _Counted(DefaultReduceScatter(), f"{name}.gradients", _count_scatter)
        each.set_custom_reduce_scatter(scatters)


def follow(
    optimizer: Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> None:
    """Let an optimizer update new parameters in place of old ones of the same names."""
    new: dict[torch.Tensor, nn.Parameter] = {p: after[name] for name, p in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for p in [p for p in optimizer.state if p in new and new[p] is not p]:
        optimizer.state[new[p]] = Slicing.of(new[p]).state_slices(optimizer.state.pop(p), new[p])


class _Counted:
    """A collective of PyTorch whose bytes are counted, and whose waits the watcher sees."""

    def __init__(
        self, collective: Any, key: str, note: Callable[[torch.Tensor, int], None]
    ) -> None:
        self.allocate = collective.allocate
        self._collective, self._key, self._note = collective, key, note
        self._calls = itertools.count(1)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **options: Any,
    ) -> Any:
        self._note(input_tensor, group.size())
        number = next(self._calls)
        if input_tensor.is_cuda:  # the host does not wait
            return self._collective(output_tensor, input_tensor, group, *args, **options)
        where = "the model's forward or backward pass"
        with call(where, number, self._key), waiting_for_all_ranks():
            work = self._collective(output_tensor, input_tensor, group, *args, **options)
            if work is not None:
                work.wait()
            return work


def _count_gather(note: Callable[[int], None], part: int, sent: torch.Tensor, ranks: int) -> None:
    note(part)
    count("weights", of_allgather(sent.nbytes, ranks))


def _count_scatter(sent: torch.Tensor, ranks: int) -> None:
    # Half of an allreduce sends as much as an all-to-all; gloo does all of it.
    of = of_alltoall if sent.is_cuda else of_allreduce
    count("gradients", of(sent.nbytes, ranks))


def _require_gradients(optimizer: Optimizer) -> None:
    """Raise if a step would change nothing."""
    trained = [p for p in parameters_of(optimizer) if p.requires_grad]
    # A rank may have no part of a small parameter.
    trained = [p for p in trained if not isinstance(p, DTensor) or p.to_local().numel()]
    if trained and all(p.grad is None for p in trained):
        raise ValueError(
            f"{type(optimizer).__name__}.step() without a gradient: with FullyShard, gradients "
            "come from loss.backward() without inputs=, and not from torch.autograd.grad; "
            "hvkit.FullyShard(reshard_after_forward=False) takes inputs=, too"
        )


def _units_of(model: nn.Module) -> list[nn.Module]:
    """The parts that are gathered one at a time: elements of lists and sequences of layers.

    None shares a parameter with the rest of the model, and none is inside another.
    """
    uses = _uses_in(model)
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            inside = _uses_in(child)
            unshared = all(uses[p] == number for p, number in inside.items())
            if is_list and inside and unshared and not isinstance(child, nn.ModuleList):
                found.append(child)
            else:
                search(child)

    search(model)
    return found


def _uses_in(module: nn.Module) -> Counter[nn.Parameter]:
    """How many modules inside this one have each parameter directly."""
    return Counter(p for each in module.modules() for p in each.parameters(recurse=False))


def shard_stage(
    model: nn.Module,
    own: Mapping[str, nn.Parameter],
    unsharded: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    value_readers: Collection[str],
    mesh: DeviceMesh,
    name: str,
) -> dict[str, nn.Parameter]:
    """Divide a rank's parameters, and return them, some replaced by new ones; a collective.

    Stages end after the modules ``cuts``. What the modules ``value_readers`` call may depend on
    values. The mesh is that of the shard axis, or of the data and the shard axis.
    """
    sharded = set(own.values()) - set(unsharded)
    inside = {
        m for reader in value_readers for m in list(model.get_submodule(reader).modules())[1:]
    }
    units = [unit for unit in _units_of(model) if unit not in inside]
    parts = [*units, model]
    if cuts:
        parts = _parts_within(model, units, inside, sharded, cuts, called, value_readers)
    # A forward pass in a mesh compares more than the order of layers.
    _shard_parts(parts, mesh, name, lambda number: None)
    for part in parts if value_readers else ():
        _agree_on_gradients(part, mesh)
    now = dict(model.named_parameters())
    return {name: now[name] for name in own}


def _agree_on_gradients(part: Any, mesh: DeviceMesh) -> None:
    """Give a rank zero gradients for parameters, as of an expert, that only other ranks have used.

    PyTorch would reduce the gradients that each rank happens to have.
    """
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        group.post_backward = functools.partial(_with_zeros, group, group.post_backward, mesh)


@torch.no_grad()
def _with_zeros(group: Any, own: Callable[..., Any], mesh: DeviceMesh, *unused: Any) -> Any:
    parameters = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
    used = [
        each.unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None
        for each in parameters
    ]
    used_anywhere = torch.tensor(used, dtype=torch.int32, device=mesh.device_type)
    for axis in range(mesh.ndim):
        if parameters:
            dist.all_reduce(used_anywhere, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for each, here, anywhere in zip(parameters, used, used_anywhere.tolist(), strict=True):
        if anywhere and not here:
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
    return own(*unused)


def _parts_within(
    model: nn.Module,
    units: Collection[nn.Module],
    inside: Collection[nn.Module],
    sharded: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    value_readers: Collection[str],
) -> list[nn.Module]:
    """Modules that are gathered one at a time: layers of lists, then modules outside of these.

    Weights are there only while their module is called. So a module whose weights another one
    reads, as the last projection of ``nn.MultiheadAttention``, is gathered with that one. So is a
    module that another calls or not by values, as an expert.
    """
    at_cuts = {model.get_submodule(cut) for cut in cuts}
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for unit in units:
        has_cut = not at_cuts.isdisjoint(set(unit.modules()) - {unit})
        if not has_cut and all(p in sharded for p in unit.parameters()):
            found.append(unit)
            taken.update(unit.parameters())
    uses = _uses_in(model)
    outer = {""}
    for name in called:
        while name := name.rpartition(".")[0]:
            outer.add(name)
    outer -= set(value_readers)
    for name, module in model.named_modules():
        own = list(module.parameters())
        unshared = all(p in sharded and p not in taken and uses[p] == 1 for p in own)
        if own and unshared and name in called and name not in outer and module not in inside:
            found.append(module)
    return found
