"""This process's rank, among all or in a group of ranks, and the start of Horovod.

With one process nothing is started. With several, the first use starts Horovod through the library
of the framework that the script has imported, or for JAX, MPI and JAX's own processes.

Whatever counts ranks, averages over them or names them takes a ``Group``: that of ``all_ranks()``,
or a smaller one, such as a row of a device mesh, which ``hvkit.mesh.divide`` makes.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hvkit import watch
from hvkit.errors import LaunchError, ranks_text
from hvkit.host.rank_variables import Launched, launch_id, launched, rank_id, rank_settings
from hvkit.host.run_reports import report
from hvkit.host.system import claim
from hvkit.log import logger
from hvkit.transport.engines import ENGINES, Engine, ProcessSet, broadcast_message, built_for
from hvkit.watch.calls import report_every_second


@dataclass(frozen=True)
class _World:
    """The four numbers of a rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    # Whether they are those of the rank that started this process, as one of a data loader.
    of_parent: bool = False


_FRAMEWORKS = (*ENGINES, "jax")

# A rank sets this variable, so that processes that it starts know that they are no ranks.
_MARK = "HVKIT_RANK"

_world: _World | None = None
_engines: dict[str, Engine] = {}


def init(framework: str | None = None) -> None:
    """Start Horovod if this process is one of several ranks, and pin it to its GPU.

    ``hvkit.distribute`` calls this. Call it yourself, right after the imports, if code before
    that needs the rank, or if TensorFlow sees more than one GPU. A second call does nothing.

    A JAX script must call ``hvkit.init("jax")`` before it makes its first array: it starts JAX's
    own processes, one for each rank, and needs no Horovod.

    Args:
        framework: ``"torch"``, ``"tensorflow"`` or ``"jax"``; by default the one that is imported
            already.

    Raises:
        ValueError: unknown framework.
        HorovodNotFoundError: several ranks were launched, but there is no usable Horovod.
        LaunchError: Horovod sees another number of ranks than were launched, this host has more
            ranks than GPUs, or JAX has made arrays already.
    """
    if framework is not None and framework not in _FRAMEWORKS:
        raise ValueError(f"framework must be one of {sorted(_FRAMEWORKS)}, got {framework!r}")
    world = _world or _join(framework)
    if world.size > 1 and framework is not None and framework not in _engines:
        _refuse_in_child(world)
        engine = _new_engine(framework)
        engine.take_device(world.local_rank, world.local_size)
        _engines[framework] = engine


def rank() -> int:
    """This process's number among all ranks, from 0 to ``size() - 1``.

    The first call starts Horovod, and raises the errors of ``init``.
    """
    return _joined().rank


def size() -> int:
    """World size: the number of ranks on all hosts together. Starts Horovod as ``rank`` does."""
    return _joined().size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0 to ``local_size() - 1``.

    Starts Horovod as ``rank`` does.
    """
    return _joined().local_rank


def local_size() -> int:
    """The number of ranks on this host. Starts Horovod as ``rank`` does."""
    return _joined().local_size


def engine(framework: str) -> Engine:
    """The started Horovod of ``framework``; only with several ranks."""
    init(framework)
    return _engines[framework]


def any_engine() -> Engine:
    """The Horovod that was started first; only with several ranks."""
    _refuse_in_child(_joined())
    return next(iter(_engines.values()))


def started() -> bool:
    return bool(_engines)


def is_below_rank() -> bool:
    """Whether this process is a rank that has started Horovod, or was started by one."""
    return _MARK in os.environ


def uses_mpi() -> bool:
    """Whether MPI runs in this process: not under Gloo, nor in a process that a rank started."""
    return any(engine.hvd.mpi_enabled() for engine in _engines.values())


@dataclass(frozen=True)
class Group:
    """Ranks that train together, one of which is this process."""

    rank: int  # this process's number among the members, from 0
    # Their numbers among all ranks, in ascending order. Errors and logs use these.
    members: tuple[int, ...]
    # None for all ranks, and for a single one, which sends nothing.
    process_set: ProcessSet | None = field(default=None, repr=False)
    # Whose Horovod has the process set, ``"torch"`` or ``"tensorflow"``.
    framework: str = field(default="", repr=False)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def first(self) -> int:
        """The member whose weights all others get, and which logs for them."""
        return self.members[0]

    @property
    def is_all_ranks(self) -> bool:
        return self.size == size()

    @property
    def engine(self) -> Engine:
        """The Horovod that sends what is not a tensor of a framework."""
        return engine(self.framework) if self.framework else any_engine()

    def require_all_ranks(self, call: str) -> None:
        if not self.is_all_ranks:
            raise ValueError(
                f"{call} needs all ranks, but {ranks_text(self.members)} train as a group"
            )

    def numbered(self, prefix: str) -> str:
        """A new name for collectives: ``hvkit.0``, then ``hvkit.1``; the same on every member.

        All members must request the names with a prefix in the same order. Each group counts
        separately, and its number is part of its names: ``hvkit.set1.0``.
        """
        within = f".set{self.process_set.process_set_id}" if self.process_set else ""
        return f"{prefix}{within}.{next(_numbers[self.members, prefix])}"


_numbers: defaultdict[tuple[tuple[int, ...], str], Iterator[int]] = defaultdict(itertools.count)


def all_ranks() -> Group:
    return Group(rank(), tuple(range(size())))


def _joined() -> _World:
    return _world or _join()


def _join(framework: str | None = None) -> _World:
    global _world
    if (parent := _rank_of_parent()) is not None:
        _world = parent
        return _world
    announced = launched(os.environ)
    if announced is None or announced.size == 1:
        report_every_second()
        _world = _World(rank=0, size=1, local_rank=0, local_size=1)
        return _world
    _refuse_second_process()
    for each in rank_settings(os.environ):  # Horovod and Open MPI read them when they start
        os.environ[each.variable] = each.value
        logger.debug("set %s=%s: %s", each.variable, each.value, each.reason)
    framework = framework or _imported_framework()
    report(starting=True)
    try:
        with watch.starting():
            engine = _new_engine(framework)
    finally:
        report(starting=False)
    hvd = engine.hvd
    if hvd.size() != announced.size:
        raise LaunchError(_another_size(announced, hvd.size(), engine.library))
    report(pid=os.getpid())
    report_every_second()
    _world = _World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    engine.take_device(_world.local_rank, _world.local_size)
    _engines[framework] = engine
    numbers = (_world.rank, _world.size, _world.local_rank, _world.local_size)
    os.environ[_MARK] = json.dumps([launch_id(os.environ), *numbers])
    watch.start(
        _world.rank,
        _world.size,
        one_host=_world.local_size == _world.size,
        from_rank_0=lambda message: broadcast_message(engine, message, root=0),
        shut_down=_shut_down,
    )
    return _world


def _new_engine(framework: str) -> Engine:
    if framework == "jax":
        from hvkit.transport.jax_engine import JaxEngine

        return JaxEngine()
    return ENGINES[framework]()


def _another_size(announced: Launched, seen: int, library: str) -> str:
    """Why Horovod or mpi4py sees another number of ranks than were launched, and the fix."""
    counts = (
        f"{announced.launcher} launched {announced.size} processes, but {library} sees {seen}: "
    )
    if announced.launcher == "srun":
        return (
            f"{counts}the MPI below it does not take its ranks from this srun. Start the script "
            f"with `hvkit run` instead, as in `salloc -n {announced.size} hvkit run "
            "train.py`, or in a batch script (`hvkit manifest slurm` writes one)"
        )
    if library != "Horovod":
        return (
            f"{counts}it has loaded another MPI than this {announced.launcher} belongs to. Start "
            "the ranks with `hvkit run` or with the mpirun of the MPI that mpi4py finds "
            "(`python -m mpi4py --mpi-lib-version`)"
        )
    return (
        f"{counts}it was built for another MPI than this {announced.launcher} belongs to. Rebuild "
        "it with: hvkit install-horovod --force"
    )


def _shut_down() -> None:
    for each in list(_engines.values()):
        each.shut_down()


def _imported_framework() -> str:
    """The framework that the script has imported; else one that Horovod was built for."""
    keras = sys.modules.get("keras")
    if keras is not None and keras.backend.backend() == "jax":
        return "jax"
    for framework in _FRAMEWORKS:  # JAX last: its scripts may load data with another one
        if framework in sys.modules:
            return framework
    return next(iter(built_for()), "torch")


def _rank_of_parent() -> _World | None:
    """The rank that started this process, unless a launcher started it as a rank of its own."""
    mark = os.environ.get(_MARK)
    if mark is None:
        return None
    launch, *numbers = json.loads(mark)
    return replace(_World(*numbers), of_parent=True) if launch == launch_id(os.environ) else None


def _became_child() -> None:
    """A fork of a rank is not a rank: its copy of Horovod has no threads and cannot communicate."""
    global _world
    if _world is not None and _world.size > 1:
        _world = replace(_world, of_parent=True)


os.register_at_fork(after_in_child=_became_child)


# The end of errors about processes that the script itself starts.
_STARTS_PROCESSES = (
    "through torch.multiprocessing.spawn, multiprocessing or subprocess: call the function that "
    "trains directly, and start the script with `hvkit run -np N script.py`"
)


def _refuse_in_child(world: _World) -> None:
    if world.of_parent:
        raise LaunchError(
            f"this process was started by rank {world.rank} and is not a rank: it has that "
            "rank's numbers, but cannot communicate; call hvkit.distribute and collectives under "
            'if __name__ == "__main__". If the script itself starts the processes that train, '
            f"{_STARTS_PROCESSES}"
        )


def _refuse_second_process() -> None:
    """Raise if another process that this rank's launcher, or its command, started is the rank."""
    if (name := rank_id(os.environ)) is not None and not claim(f"rank {name}"):
        raise LaunchError(
            "the script starts several processes that call hvkit, but only one can be the rank "
            f"that the launcher has started: start none {_STARTS_PROCESSES}"
        )


_warned_of_others = False


def refuse_separate_training() -> None:
    """Without a launcher, refuse or warn if several processes of the script train separately.

    Each would train a model of its own, as hvkit does not join them.
    ``torch.multiprocessing.spawn`` is for one training; other processes may rightly be separate, as
    in a search, so that is a warning.
    """
    global _warned_of_others
    parent = multiprocessing.parent_process()
    if parent is None or _joined().size > 1 or claim(f"training in a child of {parent.pid}"):
        return
    text = "processes that the script has started train separately, each a model of its own"
    frames = (frame for frame, _ in traceback.walk_stack(None))
    if any(f.f_globals.get("__name__") == "torch.multiprocessing.spawn" for f in frames):
        raise LaunchError(f"{text}: start none {_STARTS_PROCESSES}")
    if not _warned_of_others:
        _warned_of_others = True
        advice = f"if they should train one together, start none {_STARTS_PROCESSES}"
        logger.warning("%s: %s", text, advice)
