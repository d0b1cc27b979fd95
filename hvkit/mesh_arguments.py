"""The arguments of ``hvkit.distribute`` about a mesh: what they mean, and what does not fit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvkit import runtime
from hvkit.argument_checks import check_count, check_one_of
from hvkit.communication.division import divide
from hvkit.communication.group import Group
from hvkit.mesh import SCHEDULES, Mesh, MeshOptions, position_in, rows
from hvkit.strategies.diloco import DiLoCo
from hvkit.strategies.local_sgd import LocalSGD
from hvkit.strategies.synchronous import SYNCHRONOUS, Synchronous
from hvkit.sync.port import Options


def mesh_options(
    mesh: Mesh | None,
    microbatches: int | None,
    schedule: str,
    stages: Sequence[str] | str,
    plan: Mapping[str, Any] | None,
) -> MeshOptions | None:
    """What was passed about a mesh; None if nothing.

    Raises:
        TypeError, ValueError: a wrong value, or one that needs a mesh.
    """
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


# What works among ranks that hold the same part of a model.
_IN_MESHES = (Synchronous, LocalSGD, DiLoCo)


def refuse_in_mesh(in_mesh: MeshOptions, options: Options) -> None:
    """Raise for what does not work yet where a model is divided.

    Raises:
        ValueError: with the reason.
    """
    mesh = in_mesh.mesh
    if not isinstance(options.strategy, _IN_MESHES):
        known = ", ".join(each.__name__ for each in _IN_MESHES)
        raise ValueError(
            f"{options.strategy} does not work along the data axis of {mesh}, where ranks hold a "
            f"part of the model: use {known}"
        )
    if mesh.shard > 1 and (options.strategy, options.compression) != (SYNCHRONOUS, None):
        raise ValueError(
            f"along the shard axis of {mesh} PyTorch averages gradients: leave out strategy= and "
            "compression=, or use the data axis instead"
        )
    if mesh.shard > 1 and in_mesh.schedule not in ("GPipe", "1F1B"):
        raise ValueError(
            f"schedule={in_mesh.schedule!r} runs several stages on a rank, or computes gradients "
            f"of weights apart, where PyTorch does not gather those of {mesh}: use 'GPipe' or "
            "'1F1B'"
        )
    if options.batch_norm == "sync":
        raise ValueError(
            f'batch_norm="sync" does not work in micro-batches, as in {mesh}: use "average"'
        )


def in_data_group(options: Options, in_mesh: MeshOptions, engine: str | None) -> Options:
    """The options for the ranks that hold the same part of a model; a collective of all ranks."""
    mesh, position = in_mesh.mesh, in_mesh.position
    if mesh.shard > 1 or mesh.data == 1:
        # Horovod sends nothing in it.
        group = Group(position.batch, position.members("data", "shard"))
    else:
        group = divide(rows(mesh, "data"), engine)
    return replace(options, mesh=in_mesh, group=group)
