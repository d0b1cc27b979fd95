"""``hvkit.Mesh``: ranks in rows and columns, each axis with its own way of dividing the work.

Ranks stand in the order data, shard, pipeline, tensor: the tensor axis changes fastest, so that
neighbours, which are on one host, exchange the most.

A row becomes a ``Group``. Horovod accepts new groups after its start only if an environment
variable was set before. Its threads then exchange one more message in every cycle, in which they
keep a core busy. So the variable is set only if a script makes groups.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from hvkit import runtime
from hvkit.argument_checks import check_count, check_one_of
from hvkit.communication.collectives import require_equal, together
from hvkit.errors import LaunchError
from hvkit.runtime import Group
from hvkit.transport.engines import Engine, ProcessSet
from hvkit.watch.calls import waiting_for_all_ranks

Axis = Literal["data", "shard", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)  # the outermost first

# Of pipelines.
SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)

_REST = -1

_GROUPS_VARIABLE = "HOROVOD_DYNAMIC_PROCESS_SETS"


@dataclass(frozen=True)
class Mesh:
    """How many ranks stand along each axis. All ranks must make an equal one.

    The product of the axes is the number of ranks. One axis may be -1: it gets the ranks that the
    others leave. Make the mesh before the first call that starts Horovod, such as ``hvkit.rank()``,
    because Horovod must know when it starts that there will be groups of ranks.

    Args:
        data: rows of ranks that each train a whole model on batches of their own, kept in step by
            ``strategy=``.
        pipeline: ranks that hold successive stages of the layers.
        tensor: ranks that hold a part of each layer.
        shard: ranks that hold a part of each weight between uses, as ``FullyShard``, on batches of
            their own.

    Raises:
        TypeError: an axis is no int.
        ValueError: an axis is neither positive nor -1, or several are -1.
    """

    data: int = _REST
    pipeline: int = 1
    tensor: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            length = getattr(self, axis)
            if not isinstance(length, int) or isinstance(length, bool):
                raise TypeError(f"{axis} of a Mesh must be an int, got {length!r}")
            if length < 1 and length != _REST:
                raise ValueError(
                    f"{axis} of a Mesh must be a positive number of ranks, or -1 for those that "
                    f"the other axes leave, got {length}"
                )
        open_axes = [axis for axis in AXES if getattr(self, axis) == _REST]
        if len(open_axes) > 1:
            raise ValueError(
                f"{' and '.join(open_axes)} of a Mesh are -1, but only one axis can get the ranks "
                "that the others leave: give the other one a number"
            )
        if self.data != 1 and (self.pipeline, self.tensor, self.shard) != (1, 1, 1):
            allow_groups()

    def filled(self, size: int) -> Mesh:
        """The mesh of so many ranks, without -1.

        Raises:
            ValueError: the axes do not make up that many.
        """
        lengths = {axis: getattr(self, axis) for axis in AXES}
        known = math.prod(length for length in lengths.values() if length != _REST)
        rest, left = divmod(size, known)
        full = {axis: rest if length == _REST else length for axis, length in lengths.items()}
        if left or math.prod(full.values()) != size:
            product = " x ".join(
                f"{axis} {n}" for axis, n in lengths.items() if n not in (1, _REST)
            )
            raise ValueError(
                f"{self} needs a number of ranks that {product or 'its axes'} divide, but there "
                f"are {size}: choose axes whose product is {size}, or start {known} ranks"
            )
        return Mesh(**full)


@dataclass(frozen=True)
class MeshPosition:
    """A rank's position in a mesh."""

    mesh: Mesh  # without -1
    rank: int

    def along(self, axis: Axis) -> int:
        """The rank's number along an axis, from 0."""
        return int(np.unravel_index(self.rank, _shape(self.mesh))[AXES.index(axis)])

    @property
    def batch(self) -> int:
        """Which part of each global batch the rank gets, from 0."""
        return self.along("data") * self.mesh.shard + self.along("shard")

    @property
    def batches(self) -> int:
        """How many parts a global batch has."""
        return self.mesh.data * self.mesh.shard

    def members(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes only, and this one."""
        return next(row for row in rows(self.mesh, *axes) if self.rank in row)


def rows(mesh: Mesh, *axes: Axis) -> list[tuple[int, ...]]:
    """All ranks of a mesh without -1, in groups whose members differ along these axes only."""
    shape = _shape(mesh)
    outer, inner = ([n for n, a in enumerate(AXES) if (a in axes) is i] for i in (False, True))
    ranks = np.arange(math.prod(shape)).reshape(shape).transpose(outer + inner)
    return [tuple(row) for row in ranks.reshape(-1, math.prod(shape[n] for n in inner)).tolist()]


def positions(mesh: Mesh) -> list[MeshPosition]:
    return [MeshPosition(mesh, rank) for rank in range(math.prod(_shape(mesh)))]


def _shape(mesh: Mesh) -> tuple[int, ...]:
    return mesh.data, mesh.shard, mesh.pipeline, mesh.tensor


def position_in(mesh: Mesh) -> MeshPosition:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a hvkit.Mesh, such as hvkit.Mesh(pipeline=2), got {mesh!r}")
    # A single process has all of the model.
    filled = Mesh(1) if runtime.size() == 1 else mesh.filled(runtime.size())
    return MeshPosition(filled, runtime.rank())


def picture(mesh: Mesh, hosts: Sequence[str]) -> str:
    """A mesh without -1: a line for a part of a batch, a column for a stage, each rank's host."""
    used = [f"{axis} {n}" for axis in AXES if (n := getattr(mesh, axis)) > 1]
    head = f"{len(hosts)} ranks: {' x '.join(used) or 'one'}"
    lines: dict[tuple[int, int], list[str]] = {}
    for row in rows(mesh, "tensor"):
        first = MeshPosition(mesh, row[0])
        key = first.along("data"), first.along("shard")
        names = list(dict.fromkeys(hosts[rank] for rank in row))
        where = f" on {', '.join(names)}" if len(set(hosts)) > 1 else ""
        lines.setdefault(key, []).append(f"{' '.join(map(str, row))}{where}")
    stages = [f"stage {n}" for n in range(mesh.pipeline)] if mesh.pipeline > 1 else ["ranks"]
    table = [["", *stages]]
    for (data, shard), cells in lines.items():
        parts = [f"data {data}"] * (mesh.data > 1) + [f"shard {shard}"] * (mesh.shard > 1)
        table.append([" ".join(parts), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return "\n    ".join([head, *text])


@dataclass(frozen=True)
class MeshOptions:
    """The arguments of ``hvkit.distribute`` about a mesh."""

    position: MeshPosition = dataclasses.field(repr=False)
    microbatches: int
    schedule: str
    stages: tuple[str, ...] | str  # where to cut, or what to balance
    plan: Mapping[str, Any] | None = None

    @property
    def mesh(self) -> Mesh:
        return self.position.mesh


def mesh_options(
    mesh: Mesh | None,
    microbatches: int | None,
    schedule: str,
    stages: Sequence[str] | str,
    plan: Mapping[str, Any] | None,
) -> MeshOptions | None:
    """The arguments about a mesh; None if there are none, or all ranks are along the data axis."""
    given = {"microbatches": microbatches, "schedule": schedule, "stages": stages, "plan": plan}
    if mesh is None:
        for name, value in given.items():
            if value not in (None, "GPipe", "flops"):
                raise ValueError(f"{name}={value!r} needs a mesh: pass mesh=hvkit.Mesh(pipeline=2)")
        return None
    position = position_in(mesh)
    count = 4 * position.mesh.pipeline if microbatches is None else microbatches
    if microbatches is not None and position.mesh.pipeline == 1 < runtime.size():
        raise ValueError(
            f"microbatches={microbatches} needs a pipeline, but {position.mesh} has none: pass "
            "hvkit.Mesh(pipeline=2)"
        )
    check_one_of("schedule", schedule, SCHEDULES)
    if schedule != "GPipe" and count % position.mesh.pipeline:
        raise ValueError(
            f"microbatches={count} with schedule={schedule!r} must be a multiple of the "
            f"{position.mesh.pipeline} ranks of the pipeline"
        )
    if position.mesh == Mesh(runtime.size()):  # each rank holds all of the model, as without a mesh
        return None
    if not isinstance(stages, str) and not all(isinstance(each, str) for each in stages):
        raise TypeError(f"stages must hold the names of modules, got {stages!r}")
    return MeshOptions(
        position,
        check_count("microbatches", count),
        schedule,
        stages if isinstance(stages, str) else tuple(stages),
        plan,
    )


def allow_groups() -> None:
    """Let a Horovod that starts later accept groups; call it on every rank, or on none."""
    if not runtime.started():
        os.environ.setdefault(_GROUPS_VARIABLE, "1")


def divide(rows: Sequence[Sequence[int]], framework: str) -> Group:
    """This process's group among these, of several ranks each; a collective of all ranks.

    The groups will send tensors of ``"torch"`` or ``"tensorflow"``. Each rank is in one row, in
    ascending order. Equal rows give equal groups in each call.
    """
    allow_groups()
    runtime.init(framework)
    with together():
        if os.environ.get(_GROUPS_VARIABLE) != "1":
            raise LaunchError(
                "groups of ranks need a Horovod that was started for them: make the hvkit.Mesh "
                "before the first call of hvkit.init(), hvkit.rank() and the like, on every rank, "
                f"or set {_GROUPS_VARIABLE}=1 in the environment of all ranks"
            )
    require_equal("division into groups", [str([*row]) for row in rows], "pass the same rows")
    engine, rank = runtime.engine(framework), runtime.rank()
    with waiting_for_all_ranks():  # Horovod on each rank must know all of them
        sets = [_process_set_of(engine, tuple(row)) for row in rows]
    of_rank = next(each for each in sets if rank in each.ranks)
    return Group(of_rank.ranks.index(rank), of_rank.ranks, of_rank, framework)


def _process_set_of(engine: Engine, ranks: tuple[int, ...]) -> ProcessSet:
    """Horovod's process set of some ranks, in ascending order; a collective of all ranks."""
    # Functions of this library: those in horovod.common call the library that was loaded last.
    basics = engine.hvd.mpi_ops._basics
    number = basics._add_process_set_impl(ranks)
    if number is None:  # it knows them already
        known = basics._get_process_set_ids_and_ranks()
        number = next(each for each, members in known.items() if tuple(members) == ranks)
    return ProcessSet(number, ranks)


def deferred_init() -> AbstractContextManager[None]:
    """Build a PyTorch model that does not fit into this rank's memory.

    ::

        with hvkit.deferred_init():
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = hvkit.distribute(model, optimizer, mesh=hvkit.Mesh(pipeline=2))

    Inside the block parameters and buffers get shapes, but neither memory nor values: they are on
    PyTorch's meta device. ``hvkit.distribute`` makes the ones that this rank needs, with the values
    that the plain constructor would have given. In one process it gives the plain model.

    Initialise, load, convert and move the model inside the block. Changes of values after it and
    before ``hvkit.distribute`` have no effect, and are refused where hvkit can notice them. Values
    that depend on no random numbers can be read in the block (``.item()``, ``if tensor > 0``), and
    are computed then. Random numbers are drawn in the block, for one tensor at a time, and
    continue after it as without it. In a mesh every rank must draw equally often there.

    Raises:
        ValueError: in the block, where the script reads random values, draws with a
            ``torch.Generator`` of its own or on another device than the CPU, changes a real tensor
            by a deferred one, or uses a tensor on the meta device that is not of this block.
    """
    from hvkit.frameworks.pytorch.model_parallel import deferred_init as pytorch

    return pytorch.deferred_init()
