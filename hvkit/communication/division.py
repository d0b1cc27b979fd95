"""Divides all ranks into groups, such as the rows of a device mesh.

Horovod accepts new groups after its start only if an environment variable was set before. Its
threads then exchange one more message in every cycle, in which they keep a core busy. So the
variable is set only if a script makes groups.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvkit import runtime
from hvkit.communication.collectives import raise_together, require_equal
from hvkit.communication.group import Group, all_ranks
from hvkit.errors import LaunchError
from hvkit.transport.engines import Engine, ProcessSet
from hvkit.watch.calls import waiting_for_all_ranks

_VARIABLE = "HOROVOD_DYNAMIC_PROCESS_SETS"


def allow_groups() -> None:
    """Let a Horovod that starts later accept groups; call it on every rank, or on none."""
    if not runtime.started():
        os.environ.setdefault(_VARIABLE, "1")


def divide(rows: Sequence[Sequence[int]], framework: str | None = None) -> Group:
    """Divide all ranks into groups, and return this process's; a collective of all ranks.

    The same rows give the same groups again.

    Args:
        rows: the numbers of each group's ranks; each rank is in one group. The same on every rank.
        framework: ``"torch"`` or ``"tensorflow"``, whose tensors the groups will send; by default
            the one that is imported.

    Raises:
        ValueError: a rank is in no group, or in several; on every rank.
        RanksDisagreeError: the ranks pass different rows.
        LaunchError: Horovod has started without support for groups; on every rank.
    """
    allow_groups()
    runtime.init(framework)
    groups = sorted(tuple(sorted(row)) for row in rows)
    problem: Exception | None = None
    if sorted(rank for group in groups for rank in group) != list(range(runtime.size())):
        problem = ValueError(
            f"rows must hold each rank from 0 to {runtime.size() - 1} once, got {list(rows)}"
        )
    elif any(1 < len(group) < runtime.size() for group in groups) and (
        os.environ.get(_VARIABLE) != "1"
    ):
        problem = LaunchError(
            "groups of ranks need a Horovod that was started for them: make the hvkit.Mesh before "
            "the first call of hvkit.init(), hvkit.rank() and the like, on every rank, or set "
            f"{_VARIABLE}=1 in the environment of all ranks"
        )
    raise_together(problem, "distribute")
    require_equal("division into groups", [str(group) for group in groups], "pass the same rows")
    own = next(group for group in groups if runtime.rank() in group)
    if own == all_ranks().members:
        return all_ranks()
    engine = runtime.engine(framework) if framework else runtime.any_engine()
    sets = {}
    with waiting_for_all_ranks():
        for group in groups:  # Horovod on each rank must know all of them
            if len(group) > 1:
                sets[group] = _process_set_of(engine, group)
    name = framework or runtime.name_of(engine)
    position = own.index(runtime.rank())
    return Group(position, own, sets[own], name) if own in sets else Group(position, own)


def _process_set_of(engine: Engine, ranks: tuple[int, ...]) -> ProcessSet:
    """Horovod's process set of some ranks, in ascending order; a collective of all ranks.

    The engine was started with HOROVOD_DYNAMIC_PROCESS_SETS=1.
    """
    # This library's functions: those in horovod.common call the library that was loaded last.
    basics = engine.hvd.mpi_ops._basics
    number = basics._add_process_set_impl(ranks)
    if number is None:  # it knows them already
        known = basics._get_process_set_ids_and_ranks()
        number = next(each for each, members in known.items() if tuple(members) == ranks)
    return ProcessSet(number, ranks)
