"""Saving a training run from all ranks, and resuming it on all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkit import collectives, runtime
from hvkit.adapters.fingerprints import Compared, Rows, require_same
from hvkit.checkpoint import folders, manifest, ranks
from hvkit.checkpoint.manifest import Manifest
from hvkit.checkpoint.parts import parts_of
from hvkit.checkpoint.progress import Progress, checked_count, checked_extras
from hvkit.collectives import share
from hvkit.errors import HvkitError, RanksDisagreeError
from hvkit.watch.calls import named

if TYPE_CHECKING:
    import keras

_SAVE = "Checkpoint.save"
_RESTORE = "Checkpoint.restore"


class Checkpoint:
    """The checkpoints of one training run, in one directory.

    Make it after :func:`hvkit.distribute`, on every rank::

        checkpoint = hvkit.Checkpoint("runs/a", model=model, optimizer=optimizer, data=loader)
        start = checkpoint.restore()
        for epoch in range(start.epoch, epochs):
            ...
            checkpoint.save(epoch=epoch + 1, step=step)

    A checkpoint is a folder ``DIRECTORY/step-000000123``. PyTorch's state dicts lie there as
    ``model.pt`` and so on, for ``torch.load``; a Keras model as ``model.weights.h5``, for
    ``model.load_weights``; a Keras optimizer's variables in their order as ``optimizer.npz``. It is
    written aside, flushed to disk and renamed, so that a run that is killed at any moment leaves
    the newest complete one behind. Only rank 0 uses the directory; other hosts need not see it.

    A run that is stopped and resumed on the same number of ranks gives the weights of the run that
    was never stopped, bit for bit, if its data comes in the same order. To that end each rank's
    random state is saved: that of Python's ``random``, NumPy, PyTorch (CPU and this rank's GPU),
    ``tf.random.get_global_generator()``, Keras's global seed generator and the seed generators of
    the model's layers. Not saved, since TensorFlow keeps them where nobody can read them, are the
    states of ``tf.random.uniform`` and its like and of ``tf.data`` shuffles (so of the shuffle that
    ``fit`` does to arrays, too): use ``keras.random`` or ``tf.random.stateless_uniform`` and its
    like, and ``shuffle=False``. Nor are those of generator objects that a script makes itself, and
    of random numbers that a DataLoader's workers draw. What :func:`hvkit.shard` returned for a
    DataLoader or a ``PyDataset`` can be a part, and goes on in its own order. So can Keras's
    ``EarlyStopping``, ``ReduceLROnPlateau`` and ``ModelCheckpoint``, which otherwise count from
    the beginning in a resumed ``fit``.

    It holds the learning rates as the script sets them: on another number of ranks,
    ``lr_scaling`` multiplies them for the new number. Lengths that a schedule counts in steps
    (``T_max``, ``total_steps``, ``warmup_steps``) stay as they are, though an epoch has another
    number of steps then, so let such schedules count epochs. Ranks beyond those that saved keep
    the random state that the script gave them.

    Args:
        directory: the run's own; made by the first save. Two runs that save in the same one at
            the same time: the second gets an error.
        keep: so many of the newest checkpoints stay, older ones are deleted; None keeps all. One
            that cannot be deleted (NFS keeps files that are read elsewhere) goes with a later save.
        **parts: what to save, each under its name, usually ``model=`` and ``optimizer=``: PyTorch
            and Keras models and optimizers, Keras's callbacks that watch a metric, and anything
            with ``state_dict()`` and ``load_state_dict()``: schedulers, a ``GradScaler``, what
            :func:`hvkit.shard` returned.
            Lists and dicts of these, or more names, for several. Of all but random states and
            layers' statistics, rank 0's state is saved.

    Raises:
        TypeError: a part is of no kind that can be saved, or an argument of the wrong type.
        ValueError: ``keep`` is not positive, no part is given, or a name cannot be a file's.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3, **parts: Any) -> None:
        self.directory = Path(directory)
        if keep is not None and checked_count("keep", keep) < 1:
            raise ValueError(f"keep must be at least 1, or None to keep all, got {keep}")
        self.keep = keep
        self.parts = parts_of(parts)
        self._restored = Progress()
        self._epoch = 0

    @named("Checkpoint.save")
    def save(
        self, *, epoch: int, step: int, batches: int = 0, extras: dict[str, Any] | None = None
    ) -> Path:
        """Save everything; every rank has to call it, and returns when it is on disk.

        Args:
            epoch: the epoch to go on with: in the middle of an epoch its number, at its end one
                more.
            step: optimizer steps done so far. A step that was saved before is replaced.
            batches: in the middle of an epoch, for data that keeps no position itself: the batches
                of the epoch that each rank has had. What :meth:`restore` returns holds for the
                number of ranks then, rounded down.
            extras: what else :meth:`restore` shall return, of kinds that JSON holds. Rank 0's are
                saved.

        Returns:
            The checkpoint's folder.

        Raises:
            TypeError: extras or a part's state cannot be saved; nothing was changed.
            ValueError: a number is negative, or a Keras model has no weights yet.
            RanksDisagreeError: the ranks passed different epochs or steps, or their weights or
                optimizers' states are no longer the same.
            OSError: rank 0 could not write; the checkpoints before are still there.
        """
        problem: Exception | None = None
        progress, own = Progress(), {}
        compared: list[Compared] = []
        rows: list[Rows] = []
        try:
            if checked_count("epoch", epoch) > self._epoch:
                for part in self.parts:
                    part.end_epoch()
                self._epoch = epoch
            progress = Progress(
                epoch=checked_count("epoch", epoch),
                step=checked_count("step", step),
                batches=checked_count("batches", batches),
                extras=checked_extras(extras),
            )
            own = ranks.capture(self.parts)
            compared, rows = ranks.compared(self.parts)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            problem = error
        everyone = share(_SAVE, problem, (progress.epoch, progress.step))
        _require_same_progress(everyone)
        require_same(_SAVE, compared, rows)
        first = collectives.broadcast(ranks.digests(own))
        states = collectives.collect(_SAVE, ranks.unlike(own, first))
        name = folders.name_of(progress.step)
        if runtime.rank() == 0:
            try:
                self._write(name, progress, states)
            except Exception as error:
                problem = self._explained(error, name)
        share(_SAVE, problem, None)
        return self.directory / name

    def _write(self, name: str, progress: Progress, states: list[dict[str, Any]]) -> None:
        serial = folders.prepare(self.directory)

        def fill(folder: Path) -> None:
            facts = {}
            for part in self.parts:
                facts[part.name] = {**part.facts(), "file": part.file}
                part.save(folder / part.file)
            ranks.save(folder / ranks.FILE, states)
            files = sorted(path.name for path in folder.iterdir())
            for file in files:
                folders.flush(folder / file)
            Manifest(
                epoch=progress.epoch,
                step=progress.step,
                batches=progress.batches,
                size=len(states),
                serial=serial,
                extras=progress.extras,
                parts=facts,
                files={file: manifest.facts_of(folder / file) for file in files},
                versions=manifest.versions(),
            ).write(folder)
            folders.flush(folder / manifest.NAME)

        folders.write(self.directory, name, fill)
        folders.prune(self.directory, self.keep, name)

    def _explained(self, error: Exception, name: str) -> Exception:
        folder = str(self.directory / name)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            return OSError(error.errno, f"cannot write the checkpoint: {reason}", folder)
        if isinstance(error, TypeError | ValueError | HvkitError):
            return error
        return HvkitError(f"{folder}: cannot write the checkpoint: {error}")

    @named("Checkpoint.restore")
    def restore(self) -> Progress:
        """Load the newest checkpoint that is not damaged; every rank has to call it.

        Rank 0 names every newer one that is damaged, and the file and the reason. A checkpoint
        may hold more parts than this object has: rank 0 names those that it did not load.

        Returns:
            How far that run had come; ``Progress(epoch=0, step=0)`` if there is none.

        Raises:
            ValueError: the checkpoint lacks a part or does not fit one, or a Keras model has no
                weights yet.
            HvkitError: an older or newer hvkit wrote it, in another format.
            OSError: rank 0 may not read it.
        """
        from hvkit.checkpoint.restoring import find, load

        problem, found = None, None
        if runtime.rank() == 0:
            try:
                found = find(self.directory)
            except Exception as error:
                problem = error
        # Also the ranks' objects must have the same parts, or they would wait for each other.
        everyone = share(_RESTORE, problem, (found, [part.name for part in self.parts]))
        found = everyone[0][0]
        for rank, (_, names) in enumerate(everyone):
            if names != everyone[0][1]:
                raise RanksDisagreeError(
                    f"Checkpoint needs the same parts on every rank: rank 0 has "
                    f"{everyone[0][1]}, rank {rank} has {names}"
                )
        if found is None:
            return Progress()
        folder, written = found
        load(folder, written, self.parts)
        self._restored = Progress(
            epoch=written.epoch,
            step=written.step,
            batches=written.batches * written.size // runtime.size(),
            extras=written.extras,
            size=written.size,
            folder=folder,
        )
        self._epoch = written.epoch
        return self._restored

    def callback(self, every: str | int = "epoch") -> keras.callbacks.Callback:
        """A callback for ``fit`` that saves; put it last in ``callbacks``, on every rank.

        ::

            start = checkpoint.restore()
            model.fit(..., initial_epoch=start.epoch, callbacks=[..., checkpoint.callback()])

        Args:
            every: ``"epoch"``: at the end of each. Or a number of steps: every so many, too. In a
                run that resumes in the middle of an epoch, ``fit`` leaves out the batches that the
                epoch had before, and metrics of this epoch are those of its rest. That goes on
                exactly where the data of an epoch comes in an order of its own, as with
                ``shuffle=False``; what ``fit`` shuffles it shuffles anew.

        Raises:
            TypeError, ValueError: another ``every``.
        """
        from hvkit.checkpoint.callback import callback

        return callback(self, every)

    def take_batches(self, epoch: int) -> int:
        """Batches of this epoch to leave out after :meth:`restore`; for :meth:`callback`, once."""
        batches = self._restored.batches if epoch == self._restored.epoch else 0
        self._restored = Progress()
        return batches


def _require_same_progress(everyone: list[tuple[int, int]]) -> None:
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            (epoch, step), (other_epoch, other_step) = everyone[0], theirs
            raise RanksDisagreeError(
                f"save needs the same epoch and step on every rank: rank 0 passes epoch={epoch}, "
                f"step={step}, rank {rank} epoch={other_epoch}, step={other_step}"
            )
