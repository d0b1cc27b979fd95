"""``Checkpoint``: save a training run from all ranks, and resume it on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvkit import random_states, runtime
from hvkit.argument_checks import advise_on_extra_arguments, check_count, check_path
from hvkit.checkpoint import newest_checkpoint, resume, store
from hvkit.checkpoint.newest_checkpoint import RESTORE
from hvkit.checkpoint.part_types import StrategyPart, parts_for, parts_of_strategies
from hvkit.checkpoint.replicas import Replicas
from hvkit.checkpoint.resume import FitProgress, Progress
from hvkit.checkpoint.saved_object import (
    Part,
    all_of,
    named_fingerprints,
    rank_states,
    unlike_rank_0,
)
from hvkit.checkpoint.saving import SAVE, Writer
from hvkit.checkpoint.store import Manifest
from hvkit.communication import collectives
from hvkit.communication.collectives import gather_or_raise, require_equal
from hvkit.host.run_reports import report, run_name
from hvkit.log import logger
from hvkit.random_states import Arrays
from hvkit.sync.fingerprints import require_same, warn_of_unlike
from hvkit.sync.port import refuse_groups
from hvkit.watch.calls import last_step, named, resume_at
from hvkit.watch.preemption import PREEMPTION

if TYPE_CHECKING:
    import keras

_SAME = (
    "pass the same to Checkpoint and save on every rank; ranks that take different numbers of "
    "steps pass step=max(hvkit.allgather(step))"
)
_JSON = "extras hold what JSON can: dicts with str keys, lists, str, int, float, bool and None"


class Checkpoint:
    """The checkpoints of one training run, in one directory.

    Create it after ``hvkit.distribute``, on every rank:

        checkpoint = hvkit.Checkpoint("runs/a", model=model, optimizer=optimizer, data=loader)
        start = checkpoint.restore()
        for epoch in range(start.epoch, epochs):
            ...
            checkpoint.save(epoch=epoch + 1, step=step)

    A checkpoint is a folder ``DIRECTORY/step-000000123``. It holds PyTorch state dicts as
    ``model.pt`` and so on, for ``torch.load``; a Keras model as ``model.weights.h5``, for
    ``model.load_weights``; and the variables of a Keras optimizer, in their order, as
    ``optimizer.npz``. A run killed at any moment leaves its newest complete checkpoint behind. Only
    rank 0 writes to the directory; other hosts need not see it, unless it is ``sharded``.

    A run that is stopped and resumed on the same number of ranks ends with the same weights as a
    run that was never stopped, bit for bit, if its data comes in the same order. For this, each
    rank's random state is saved: Python's ``random``, NumPy, PyTorch (CPU and this rank's GPU),
    ``tf.random.get_global_generator()``, Keras's global seed generator and those of the model's
    layers. Not saved are generators that a script creates, what DataLoader workers draw, and, since
    TensorFlow gives no access to it, the state of ``tf.random.uniform`` and the like and of
    ``tf.data`` shuffles, including that of arrays in ``fit``: use ``keras.random``,
    ``tf.random.stateless_uniform`` and ``shuffle=False``. A DataLoader or ``PyDataset`` returned by
    ``hvkit.shard`` can be a part and continues in its own order. So can Keras's
    ``EarlyStopping``, ``ReduceLROnPlateau`` and ``ModelCheckpoint``, which would otherwise start
    counting again in a resumed ``fit``.

    With ``strategy=hvkit.LocalSGD(...)`` and the like, a checkpoint also holds the strategy's
    state, as ``model-strategy.npz``, and for each rank the full state of every part that differs
    from rank 0's. ``model.pt`` or ``model.weights.h5`` then holds the weights that the ranks would
    agree on. On another number of ranks the run continues from those, with a new round.

    Learning rates are saved as the script sets them: on another number of ranks, ``lr_scaling``
    multiplies them for the new number. Lengths of a schedule in steps (``T_max``, ``total_steps``,
    ``warmup_steps``) do not change, although an epoch then has another number of steps, so let such
    schedules count epochs. Ranks that had not saved keep the random state of the script.

    Args:
        directory: the run's own directory; the first save creates it. A second run that saves in it
            at the same time gets an error.
        keep: how many of the newest checkpoints to keep; None keeps all. One that cannot be deleted
            (NFS keeps files that someone reads) is deleted by a later save.
        background: whether ``save`` returns as soon as rank 0 has a copy of the files in memory,
            which a thread then writes to disk. The next ``save``, ``wait`` and the end of the
            script wait for that. If a file cannot be written, the next of these calls raises that.
        replicas: on how many other hosts to keep a copy of the newest checkpoint in memory, for
            restarts by ``hvkit run``, which load it from there, also if rank 0's host is lost and
            the directory with it. A host needs memory for two checkpoints. Sending is part of
            writing: use ``background=True``.
        sharded: whether each rank of a mesh writes its own part of the model and the optimizers
            into the directory, which all ranks must see: for models that fit into no rank. Any
            mesh resumes it, and no mesh; ``hvkit join-checkpoint`` makes plain files of it.
        **parts: the objects to save, each under its name, usually ``model=`` and ``optimizer=``:
            PyTorch and Keras models and optimizers, modules and optimizers of Flax NNX, a
            ``types.SimpleNamespace`` of pytrees, Keras callbacks that watch a metric, and anything
            with ``state_dict()`` and ``load_state_dict()``: schedulers, a ``GradScaler``,
            the results of ``hvkit.shard``. For several, pass lists, dicts or more names. Saved is
            rank 0's state, but random states and layer statistics of every rank.

    Raises:
        TypeError: a part is of a kind that cannot be saved, or an argument has the wrong type.
        ValueError: ``keep`` is not positive, ``replicas`` is negative, there is no part, or a name
            cannot be a file's.
    """

    @advise_on_extra_arguments(
        "hvkit.Checkpoint takes a directory, and what it saves by name: "
        'Checkpoint("runs/a", model=model, optimizer=optimizer)'
    )
    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        background: bool = False,
        replicas: int = 0,
        sharded: bool = False,
        **parts: Any,
    ) -> None:
        self.directory = check_path(
            "directory", directory, 'Checkpoint("runs/a", model=model, optimizer=optimizer)'
        )
        for name, value in {"background": background, "sharded": sharded}.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        self.keep = None if keep is None else check_count("keep", keep)
        self.replicas = check_count("replicas", replicas, least=0)
        self.background, self.sharded = background, sharded
        self._objects = list(parts.values())
        refuse_groups("hvkit.Checkpoint", self._objects)
        self.parts = parts_for(parts)
        if sharded:
            self._refuse_sharded()
        self._replicas = Replicas(self.directory, self.replicas)
        self._writer = Writer(self.directory, self.keep, background, self._replicas)
        self._fit_progress = FitProgress()
        self._epoch = 0
        self._equal_steps: bool | None = None

    def _refuse_sharded(self) -> None:
        """Raise ValueError if ranks cannot write their own parts."""
        if self.background or self.replicas:
            raise ValueError(
                "sharded=True writes at once, from all ranks: leave out background= and replicas="
            )
        for part in self.parts:
            if (record := part.record) and record.gathered and not record.sharded:
                raise ValueError(
                    f"sharded=True saves the parts of PyTorch's meshes, but {part.name} is divided "
                    "in another way: use mesh=hvkit.Mesh(shard=...) in place of FullyShard, or "
                    "leave out sharded="
                )

    @named("Checkpoint.save")
    def save(
        self, *, epoch: int, step: int, batches: int = 0, extras: dict[str, Any] | None = None
    ) -> Path:
        """Save everything. Every rank must call it; it returns when the files are on disk.

        With ``background=True`` it returns when rank 0 has them in memory.

        Args:
            epoch: the epoch to continue with: in the middle of an epoch its number, at its end the
                next number.
            step: optimizer steps done so far. Saving a step again replaces its checkpoint.
            batches: in the middle of an epoch, for data that does not keep its own position: the
                batches of the epoch that each rank has read. ``restore`` converts it to the
                number of ranks that resume, rounded down.
            extras: values for ``restore`` to return, of types that JSON holds. Rank 0's are
                saved.

        Returns:
            The checkpoint's folder.

        Raises:
            TypeError: extras or a part's state cannot be saved; nothing was changed.
            ValueError: a number is negative, or a Keras model has no weights yet.
            RanksDisagreeError: the ranks passed different epochs or steps, or their weights or
                optimizer states are no longer equal.
            OSError: rank 0 could not write; the earlier checkpoints are still there.
            SystemExit: with status 143, once the checkpoint is saved, if a rank got SIGTERM.
        """
        problem: Exception | None = None
        facts: list[str] = []
        of_strategies: list[StrategyPart] = []
        try:
            refuse_groups("Checkpoint.save", self._objects)
            manifest = Manifest(
                epoch=check_count("epoch", epoch, least=0),
                step=check_count("step", step, least=0),
                batches=check_count("batches", batches, least=0),
                epoch_batches=self._fit_progress.epoch_batches if batches else 0,
                extras=_as_json_object(extras),
                size=runtime.size(),
            )
            facts = [
                f"epoch={epoch}, step={step}",
                f"replicas={self.replicas}",
                f"sharded={self.sharded}",
            ]
            self._writer.wait()
            if manifest.epoch > self._epoch:
                for part in self.parts:
                    part.end_epoch()
                self._epoch = manifest.epoch
            of_strategies = parts_of_strategies(self.parts)
        except Exception as error:  # any error: the other ranks must not wait for this one
            problem = error
        # From here on no rank trains, so counts that ranks share do not change.
        leaving = any(gather_or_raise(SAVE, problem, PREEMPTION.requested))
        require_equal("checkpoint", facts, _SAME, SAVE)
        self._replicas.open(SAVE)
        for each in of_strategies:
            each.sync.wait_for_agreements()
        parts = [*self.parts, *of_strategies]
        local = _compared_states(parts, self._fit_progress.epoch_random if batches else {})
        with all_of(each.sync.settled() for each in of_strategies):
            if self.sharded:
                self._writer.save_sharded(manifest, parts, local)
            else:
                states = collectives.collect(SAVE, local)
                del local
                self._writer.save(manifest, parts, states)
        folder = self.directory / store.name_of(manifest.step)
        if leaving:
            self.wait()
            if runtime.rank() == 0:
                logger.info("saved %s after SIGTERM: all ranks leave", folder)
            PREEMPTION.leave()
        return folder

    @named("Checkpoint.end_step")
    def end_step(
        self,
        *,
        epoch: int,
        step: int,
        batches: int = 0,
        extras: dict[str, Any] | None = None,
        every: int | None = None,
    ) -> Path | None:
        """Save at the end of some steps. Every rank calls it at the end of each step.

            for x, y in loader:
                ...
                optimizer.step()
                checkpoint.end_step(epoch=epoch, step=(step := step + 1), every=500)

        It saves every ``every`` steps, and after SIGTERM: as soon as one rank gets it, because its
        host will be taken away, all ranks save at the end of the same step, and leave. From the
        first call on SIGTERM is handled in this way, unless the script has a handler of its own.
        With ``hvkit.ParameterServer``, whose ranks do not end steps together, SIGTERM ends a rank
        as without hvkit.

        Args:
            epoch, step, batches, extras: as for ``save``.
            every: steps from one save to the next; None to save only after SIGTERM.

        Returns:
            The checkpoint's folder if one was saved.

        Raises:
            SystemExit: with status 143, once the checkpoint is saved after SIGTERM.
            TypeError, ValueError: ``every`` is no positive number of steps.
            Exception: what ``save`` raises.
        """
        wanted = every is not None and step % check_count("every", every) == 0
        if self._equal_steps is None:
            syncs = [each.sync for each in parts_of_strategies(self.parts)]
            self._equal_steps = all(sync.equal_steps for sync in syncs)
        if self._equal_steps:  # so the ranks can leave at the end of one
            PREEMPTION.handle_sigterm()
            wanted |= PREEMPTION.at_last_step()
        if not wanted:
            return None
        return self.save(epoch=epoch, step=step, batches=batches, extras=extras)

    @named("Checkpoint.wait")
    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Every rank must call it.

        Without ``background=True`` it is there when ``save`` returns.

        Raises:
            OSError: rank 0 could not write it; the earlier checkpoints are still there.
        """
        if not self.background:
            self._writer.wait()  # for copies of what was loaded; they raise nothing
            return
        problem = None
        try:
            self._writer.wait()
        except Exception as error:
            problem = error
        gather_or_raise("Checkpoint.wait", problem, None)

    @named("Checkpoint.restore")
    def restore(self) -> Progress:
        """Load the newest checkpoint that is not damaged. Every rank must call it.

        In a run that ``hvkit run`` may start again, that is the newest of this run on any host that
        has ranks now, in its directory or, with ``replicas``, in its memory; otherwise the newest
        in rank 0's directory. Rank 0 logs every newer, damaged checkpoint with the file and the
        reason. If the checkpoint has parts that this object lacks, rank 0 logs their names.

        Returns:
            The progress of the saved run; ``Progress(epoch=0, step=0)`` if there is no checkpoint.

        Raises:
            ValueError: the checkpoint lacks a part or does not fit one, or a Keras model has no
                weights yet.
            RanksDisagreeError: the ranks have different parts, or ``replicas``.
            HvkitError: an older or newer hvkit wrote the checkpoint in another format.
            OSError: rank 0 may not read it.
        """
        self.wait()
        refuse_groups("Checkpoint.restore", self._objects)
        parts = [*self.parts, *parts_of_strategies(self.parts)]
        # Loading is one broadcast for each part: with different ones, ranks would wait forever.
        facts = [f"replicas={self.replicas}", f"parts {', '.join(part.name for part in parts)}"]
        require_equal("checkpoint", facts, _SAME, RESTORE)
        found = newest_checkpoint.find(self.directory, self._replicas)
        directory = store.id_of(self.directory)
        if runtime.rank() == 0:
            report(resumes=found[0].manifest.step if found else None, directory=directory)
        if found is None:
            return Progress()
        source, is_here = found
        written = source.manifest
        folder = self.directory / (source.folder.name if is_here else store.name_of(written.step))
        with nullcontext() if is_here else resume.copied_to(self.directory, source) as take:
            epoch_random = resume.load(source, parts, take)
        # Further restarts find it: it becomes one of this run, with copies on other hosts.
        folder = collectives.from_rank(
            0, folder if runtime.rank() else store.adopt(folder, written)
        )
        self._replicas.open(RESTORE)
        # If it could not be written, the folder may be another checkpoint of the same name.
        if runtime.rank() == 0 and self.replicas and store.describes(folder, written):
            self._writer.start(lambda: self._replicas.send(folder))
        self._writer.saves = written.saves if written.run == run_name() else 0
        self._epoch = written.epoch
        resume_at(written.step, collectives.from_rank(0, last_step()))
        if runtime.rank() == 0:
            report(saved=written.step, directory=directory)
        batches = resume.batches_after(written.batches, (written.size, 0), (runtime.size(), 0))
        start = Progress(
            *(written.epoch, written.step, batches, written.extras, written.size, folder),
            epoch_batches=written.epoch_batches,
        )
        self._fit_progress.start, self._fit_progress.batches_read = start, written.batches
        self._fit_progress.random = random_states.as_arrays()
        self._fit_progress.saved_epoch_random = epoch_random
        return start

    def callback(self, every: Literal["epoch"] | int = "epoch") -> keras.callbacks.Callback:
        """A callback for ``fit`` that saves. Put it into ``callbacks``, on every rank.

        Keras calls it after all others, which may still change what the next epoch begins with.

            start = checkpoint.restore()
            model.fit(..., initial_epoch=start.epoch, callbacks=[..., checkpoint.callback()])

        Args:
            every: ``"epoch"`` to save at the end of each epoch, or a number of steps to save after
                every so many steps as well; with several optimizers, a step is one of any of them.
                When a run resumes in the middle of an epoch, ``fit`` skips the batches that the
                saved run trained on, and the metrics of this epoch cover the rest of it. On
                TensorFlow the weights are those of a run without interruption only if the order of
                an epoch's data is fixed, as with ``shuffle=False``; ``fit``'s own shuffle begins
                again. On PyTorch it continues.

        Raises:
            TypeError, ValueError: ``every`` is neither of these.
        """
        from hvkit.checkpoint.fit_callback import SaveCallback  # imports Keras

        return SaveCallback(self, None if every == "epoch" else check_count("every", every))


def _compared_states(parts: Sequence[Part], epoch_random: Arrays) -> Arrays:
    """The state of this rank that differs from rank 0's, where it may differ; a collective."""
    problem: Exception | None = None
    try:
        with all_of(part.sync.unsettled() for part in parts if isinstance(part, StrategyPart)):
            local, digests = rank_states(parts, epoch_random)
        compared = named_fingerprints((part.name, *part.compared()) for part in parts)
        may_differ = named_fingerprints((part.name, *part.may_differ()) for part in parts)
    except Exception as error:  # any error: the other ranks must not wait for this one
        problem = error
    gather_or_raise(SAVE, problem, None)
    require_same(SAVE, *compared)
    warn_of_unlike(SAVE, *may_differ)
    return unlike_rank_0(local, digests)


def _as_json_object(extras: object) -> dict[str, Any]:
    if extras is None:
        return {}
    if not isinstance(extras, dict):
        raise TypeError(f"extras must be a dict, got {extras!r} of type {type(extras).__name__}")
    found: dict[str, Any] = _as_json(extras, "extras")
    return found


def _as_json(value: object, name: str) -> Any:
    """A copy with lists in place of tuples; TypeError if JSON would change anything else."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r} of type {_type_of(key)}; {_JSON}")
        return {key: _as_json(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each, f"{name}[{i}]") for i, each in enumerate(value)]
    if value is not None and not isinstance(value, str | int | float):
        hint = "; use .item() or .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(f"{name} is of type {_type_of(value)}; {_JSON}{hint}")
    return value


def _type_of(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
