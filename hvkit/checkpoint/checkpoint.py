"""``Checkpoint``: save a training run from all ranks, and resume it on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvkit import runtime
from hvkit.argument_checks import advise_on_extra_arguments, check_path
from hvkit.checkpoint import manifests, newest_checkpoint, rank_states, resume, sharded, store
from hvkit.checkpoint.object_kinds import parts_of
from hvkit.checkpoint.progress import (
    Progress,
    batches_after,
    checked_count,
    checked_every,
    checked_extras,
    require_same_progress,
)
from hvkit.checkpoint.replicas import Replicas
from hvkit.checkpoint.saved_object import Arrays, Part
from hvkit.checkpoint.strategies import StrategyPart, parts_of_strategies, together
from hvkit.checkpoint.writing import BackgroundWriter, MemoryFolder, explained, fill_folder, seal
from hvkit.communication import collectives, large_objects
from hvkit.communication.collectives import share
from hvkit.errors import HvkitError, RanksDisagreeError
from hvkit.host.run_reports import report, run_name
from hvkit.log import logger
from hvkit.sync.buffers import warn_of_unlike
from hvkit.sync.distributed_objects import refuse_groups
from hvkit.sync.fingerprints import Compared, Rows, require_same
from hvkit.watch.calls import last_step, named, resume_at
from hvkit.watch.preemption import PREEMPTION

if TYPE_CHECKING:
    import keras

_SAVE = "Checkpoint.save"
_RESTORE = "Checkpoint.restore"


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
    ``optimizer.npz``. Rank 0 writes it under another name, flushes it to disk and renames it, so a
    run killed at any moment leaves its newest complete checkpoint behind. Only rank 0 writes to
    the directory; other hosts need not see it, unless it is ``sharded``.

    A run that is stopped and resumed on the same number of ranks ends with the same weights as a
    run that was never stopped, bit for bit, if its data comes in the same order. For this, each
    rank's random state is saved: Python's ``random``, NumPy, PyTorch (CPU and this rank's GPU),
    ``tf.random.get_global_generator()``, Keras's global seed generator and the seed generators of
    the model's layers. Not saved, because TensorFlow gives no access to it, is the state of
    ``tf.random.uniform`` and the like, and of ``tf.data`` shuffles, including that of arrays in
    ``fit`` on TensorFlow. There use ``keras.random``, ``tf.random.stateless_uniform`` and the like,
    and ``shuffle=False``. Generator objects that a script creates, and random numbers that
    DataLoader workers draw, are not saved either. A DataLoader or ``PyDataset`` returned by
    ``hvkit.shard`` can be a part and continues in its own order. So can Keras's
    ``EarlyStopping``, ``ReduceLROnPlateau`` and ``ModelCheckpoint``, which would otherwise start
    counting again in a resumed ``fit``.

    With ``strategy=hvkit.LocalSGD(...)`` and the like, a checkpoint also holds the strategy's
    state, as ``model-strategy.npz``, and for each rank the whole state of every part that differs
    from rank 0's. ``model.pt`` or ``model.weights.h5`` then holds the weights that the ranks would
    agree on. On another number of ranks the run continues from those, with a new round.

    Learning rates are saved as the script sets them: on another number of ranks, ``lr_scaling``
    multiplies them for the new number. Lengths of a schedule in steps (``T_max``, ``total_steps``,
    ``warmup_steps``) do not change, although an epoch then has another number of steps, so let such
    schedules count epochs. If more ranks resume than saved, the additional ranks keep the random
    state that the script gave them.

    Args:
        directory: the run's own directory; the first save creates it. If a second run saves in it
            at the same time, that run gets an error.
        keep: how many of the newest checkpoints to keep; older ones are deleted. None keeps all.
            A checkpoint that cannot be deleted (NFS keeps files that someone reads) is deleted by
            a later save.
        background: whether ``save`` returns as soon as rank 0 has a copy of the files in memory. A
            thread then writes them to disk. The next ``save``, ``wait`` and the end of the script
            wait for that. If a file cannot be written, the next of these calls raises the error.
        replicas: on how many other hosts to keep a copy of the newest checkpoint in memory, for
            restarts by ``hvkit run``. A restart loads it from there instead of reading the
            directory, also if rank 0's host is lost and the directory with it. A host needs memory
            for two checkpoints. Sending is part of writing: use ``background=True``.
        sharded: whether each rank of a mesh writes its own part of the model and the optimizers
            into the directory, which all ranks must see: for models that fit into no rank. Any
            mesh resumes it, and no mesh; ``hvkit join-checkpoint`` makes plain files of it.
        **parts: the objects to save, each under its name, usually ``model=`` and ``optimizer=``:
            PyTorch and Keras models and optimizers, modules and optimizers of Flax NNX, a
            ``types.SimpleNamespace`` of pytrees, Keras callbacks that watch a metric, and anything
            with ``state_dict()`` and ``load_state_dict()``: schedulers, a ``GradScaler``,
            the results of ``hvkit.shard``. For several, pass lists, dicts or more names.
            Rank 0's state is saved, except for random states and layer statistics, which are saved
            for every rank.

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
        if not isinstance(background, bool):
            raise TypeError(f"background must be True or False, got {background!r}")
        self.background = background
        self._writer = BackgroundWriter()
        if keep is not None and checked_count("keep", keep) < 1:
            raise ValueError(f"keep must be at least 1, or None to keep all, got {keep}")
        self.keep = keep
        self.replicas = checked_count("replicas", replicas)
        self._replicas = Replicas(self.directory, self.replicas)
        self._things = list(parts.values())
        refuse_groups("hvkit.Checkpoint", self._things)
        self.parts = parts_of(parts)
        self.sharded = self._checked_sharded(sharded)
        self._restored = Progress()
        self._random: Arrays | None = None
        # With which ``fit`` shuffled its epoch, and the saved run the one to resume.
        self._epoch_random: Arrays = {}
        self._restored_epoch_random: Arrays = {}
        # Batches of the epoch, of a fit that runs; and those that the saved run has read.
        self._epoch_batches = self._batches_read = 0
        self._epoch = 0
        self._saves = 0
        self._together: bool | None = None

    def _checked_sharded(self, sharded: object) -> bool:
        """Whether each rank writes its own part.

        Raises:
            TypeError, ValueError: it cannot, or the argument is no bool.
        """
        if not isinstance(sharded, bool):
            raise TypeError(f"sharded must be True or False, got {sharded!r}")
        if sharded and (self.background or self.replicas):
            raise ValueError(
                "sharded=True writes at once, from all ranks: leave out background= and replicas="
            )
        for part in self.parts if sharded else ():
            if (record := part.record) and record.gathered and not record.in_parts:
                raise ValueError(
                    f"sharded=True saves the parts of a mesh, but {part.name} is divided by a "
                    "strategy: use mesh=hvkit.Mesh(shard=...) in place of FullyShard, or leave out "
                    "sharded="
                )
        return sharded

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
        progress, own = Progress(), {}
        kept: list[StrategyPart] = []
        compared: list[Compared] = []
        rows: list[Rows] = []
        may_differ: tuple[list[Compared], list[Rows]] = [], []
        try:
            refuse_groups("Checkpoint.save", self._things)
            progress = Progress(
                epoch=checked_count("epoch", epoch),
                step=checked_count("step", step),
                batches=checked_count("batches", batches),
                extras=checked_extras(extras),
                epoch_batches=self._epoch_batches if batches else 0,
            )
            self._writer.wait()
            self._end_epoch(progress.epoch)
            kept = parts_of_strategies(self.parts)
        except Exception as error:  # any error: the other ranks must not wait for this one
            problem = error
        # From here on no rank trains, so counts that ranks share do not change.
        mine_now = (progress.epoch, progress.step), PREEMPTION.requested, self.sharded
        agreed, leaving, sharded_on = zip(*share(_SAVE, problem, mine_now), strict=True)
        require_same_progress(agreed)
        if len(set(sharded_on)) > 1:
            raise RanksDisagreeError(
                f"Checkpoint needs the same sharded= on every rank: rank 0 passes {sharded_on[0]}, "
                f"rank {sharded_on.index(not sharded_on[0])} another one"
            )
        self._replicas.open(_SAVE)
        for each in kept:
            each.keeper.arrive()
        parts = [*self.parts, *kept]
        mine: dict[str, bytes] = {}
        try:
            with together(each.keeper.unsettled() for each in kept):
                own = rank_states.capture(parts, self._epoch_random if batches else {})
            mine = rank_states.digests(own)
            compared, rows = rank_states.compared(parts)
            may_differ = rank_states.may_differ(parts)
        except Exception as error:
            problem = error
        share(_SAVE, problem, None)
        require_same(_SAVE, compared, rows)
        warn_of_unlike(_SAVE, *may_differ)
        own = rank_states.differing(own, mine, collectives.from_rank(0, mine))
        name = store.name_of(progress.step)
        if self.sharded:
            self._save_shares(name, progress, parts, kept, own)
        else:
            states = large_objects.collect(_SAVE, own)
            del own
            self._save_whole(name, progress, parts, kept, states)
        if any(leaving):
            self.wait()
            if runtime.rank() == 0:
                logger.info("saved %s after SIGTERM: all ranks leave", self.directory / name)
            PREEMPTION.leave()
        return self.directory / name

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
        wanted = every is not None and step % checked_every(every) == 0
        if self._may_leave():
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
        share("Checkpoint.wait", problem, None)

    def _may_leave(self) -> bool:
        """Whether the ranks end their steps together, and so can leave at the end of one."""
        if self._together is None:
            keepers = [each.keeper for each in parts_of_strategies(self.parts)]
            self._together = all(keeper.equal_steps for keeper in keepers)
        return self._together

    def _end_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            for part in self.parts:
                part.end_epoch()
            self._epoch = epoch

    def _save_whole(
        self,
        name: str,
        progress: Progress,
        parts: list[Part],
        kept: list[StrategyPart],
        states: Iterator[dict[str, Any]],
    ) -> None:
        """Write whole objects, on rank 0; a collective."""
        problem: Exception | None = None
        with together(each.keeper.settled() for each in kept), ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.gathered())
            if runtime.rank() == 0:
                try:
                    self._write(name, progress, parts, states)
                except Exception as error:
                    problem = explained(error, self.directory / name)
            try:
                for _ in states:  # the others send theirs; after an error rank 0 drops them
                    pass
            except HvkitError as error:  # on every rank
                problem = problem or error
            share(_SAVE, problem, None)

    def _save_shares(
        self,
        name: str,
        progress: Progress,
        parts: list[Part],
        kept: list[StrategyPart],
        own: dict[str, Arrays],
    ) -> None:
        """Write each rank's own part; a collective."""
        problem: Exception | None = None
        serial = saves = 0
        if runtime.rank() == 0:
            try:
                serial, saves = self._next_numbers()
            except Exception as error:
                problem = explained(error, self.directory / name)
        share(_SAVE, problem, None)

        def finish(folder: Path, facts: sharded.Facts, written: sharded.Facts) -> None:
            seal(folder, (facts, runtime.size()), progress, serial, saves, written)

        with together(each.keeper.settled() for each in kept):
            sharded.write(_SAVE, self.directory, name, parts, own, finish)
        if runtime.rank() == 0:
            try:
                report(saved=progress.step, directory=store.id_of(self.directory))
                store.prune(self.directory, self.keep, name)
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = error
        share(_SAVE, problem, None)

    def _next_numbers(self) -> tuple[int, int]:
        """The serial of the next checkpoint, and its number in this run; locks the directory."""
        numbers = store.prepare(self.directory)
        self._saves = max(numbers.saves, self._saves) + 1
        return numbers.serial + 1, self._saves

    def _write(
        self, name: str, progress: Progress, parts: list[Part], states: Iterator[dict[str, Any]]
    ) -> None:
        """Write a checkpoint's folder, or start to; on rank 0."""
        serial, saves = self._next_numbers()
        if not self.background:

            def fill(folder: Path) -> None:
                seal(folder, fill_folder(folder, parts, states), progress, serial, saves)

            self._put(name, fill, progress)
            return
        copy = MemoryFolder([*(part.file for part in parts), rank_states.FILE])
        try:
            filled = fill_folder(copy.path, parts, states)
        except BaseException:
            copy.close()
            raise

        def write() -> None:
            def fill(folder: Path) -> None:
                copy.copy_to(folder)
                seal(folder, filled, progress, serial, saves)

            try:
                self._put(name, fill, progress)
            except Exception as error:
                raise explained(error, self.directory / name) from error
            finally:
                copy.close()

        self._writer.start(write)

    def _put(self, name: str, fill: Callable[[Path], None], progress: Progress) -> None:
        store.write_folder(self.directory, name, fill)
        report(saved=progress.step, directory=store.id_of(self.directory))
        store.prune(self.directory, self.keep, name)
        self._replicas.send(self.directory / name)

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
        refuse_groups("Checkpoint.restore", self._things)
        parts = [*self.parts, *parts_of_strategies(self.parts)]
        resume.require_same_parts(parts)
        found = newest_checkpoint.find(self.directory, self._replicas, _RESTORE)
        if runtime.rank() == 0:
            step = found[0].manifest.step if found is not None else None
            report(resumes=step, directory=store.id_of(self.directory))
        if found is None:
            return Progress()
        source, is_here = found
        written = source.manifest
        if is_here:
            folder = self.directory / source.folder.name
            epoch_random = resume.load(source, parts)
        else:
            folder = self.directory / store.name_of(written.step)
            with resume.RemoteCopy(source, self.directory) as copy:
                epoch_random = resume.load(source, parts, copy.take)
        folder = self._go_on_from(folder, written)
        self._saves = written.saves if written.run == run_name() else 0
        self._restored = Progress(
            epoch=written.epoch,
            step=written.step,
            batches=batches_after(written.batches, (written.size, 0), (runtime.size(), 0)),
            extras=written.extras,
            size=written.size,
            folder=folder,
            epoch_batches=written.epoch_batches,
        )
        self._batches_read = written.batches
        self._epoch = written.epoch
        resume_at(written.step, collectives.from_rank(0, last_step()))
        if runtime.rank() == 0:
            report(saved=written.step, directory=store.id_of(self.directory))
        self._random = rank_states.random_state()
        self._restored_epoch_random = epoch_random
        return self._restored

    def _go_on_from(self, folder: Path, manifest: manifests.Manifest) -> Path:
        """Let further restarts find a checkpoint that was loaded from any host; a collective.

        It becomes one of this run, and is copied to other hosts during training.

        Returns:
            Its folder from now on.
        """
        folder = collectives.from_rank(0, newest_checkpoint.adopt(folder, manifest))
        self._replicas.open(_RESTORE)
        # If it could not be written, the folder may be another checkpoint of the same name.
        if runtime.rank() == 0 and self.replicas and manifests.describes(folder, manifest):
            self._writer.start(lambda: self._replicas.send(folder))
        return folder

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

        steps = None if every == "epoch" else checked_every(every)
        return SaveCallback(
            self.save,
            self.wait,
            self.parts,
            self._take_batches,
            self._put_back_random,
            self._begin_epoch_of_fit,
            lambda: self._restored.step,
            steps,
        )

    def _put_back_random(self) -> None:
        """Set the random generators to the states that ``restore`` loaded; only the first time."""
        if self._random is not None:
            rank_states.set_random_state(self._random)
            self._random = None

    def _begin_epoch_of_fit(self) -> None:
        """Shuffle as the saved run did in the epoch that it did not end; only the first time."""
        if self._restored_epoch_random:
            rank_states.set_random_state(self._restored_epoch_random)
            self._restored_epoch_random = {}
        self._epoch_random = rank_states.random_state()

    def _take_batches(self, epoch: int, epoch_batches: int) -> int:
        """The batches of this epoch to skip after ``restore``; 0 at the next call.

        Args:
            epoch: that begins.
            epoch_batches: how many it has on this rank; 0 if unknown.
        """
        self._epoch_batches = epoch_batches
        start, self._restored = self._restored, Progress()
        if start.size is None or epoch != start.epoch:
            return 0
        then, now = (start.size, start.epoch_batches), (runtime.size(), epoch_batches)
        return batches_after(self._batches_read, then, now)
