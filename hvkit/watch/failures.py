"""How a rank ends: one traceback from the rank that failed, one line from each of the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

from hvkit.errors import RankLostError, RanksDisagreeError
from hvkit.watch import calls
from hvkit.watch.verdict import SAME_STEPS

_UNKNOWN = (
    "another rank has ended: look for its error above, make the same calls of hvkit on every rank, "
    f"and {SAME_STEPS}"
)


class Witness(Protocol):
    """What is known about the end of the run; the rank's watcher."""

    rank: int

    def reason(self) -> str:
        """Why the wait that this rank is in was ended; empty if that is not known."""

    def printed(self) -> bool:
        """Whether a rank has shown it already, or another one will."""

    def failed(self, how: str) -> None:
        """This rank ends with an error of its own."""


_witness: Witness | None = None
E = TypeVar("E", bound=Exception)


def install(witness: Witness) -> None:
    """From now on, errors that ended another rank first are shown in one line."""
    global _witness
    _witness = witness
    show = sys.excepthook

    def show_or_name(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        line = _line_for(error, witness)
        if line is not None:
            print(f"hvkit: {line}", file=sys.stderr, flush=True)
            return
        witness.failed(_in_short(error))
        show(kind, error, traceback)

    sys.excepthook = show_or_name


@contextmanager
def translated() -> Iterator[None]:
    """Around collectives of Horovod's: its errors become hvkit's.

    Raises:
        RankLostError: another rank has ended, or waits in another call.
        RanksDisagreeError: what the ranks sent does not fit together.
    """
    try:
        yield
    except Exception as error:
        meaning = meaning_of(error)
        if meaning is None:
            raise
        raise meaning from None


def meaning_of(error: BaseException) -> RankLostError | RanksDisagreeError | None:
    """What an error of Horovod's means; None if it is none of those."""
    text = str(error)
    if "Horovod has been shut down" in text or "Horovod has not been initialized" in text:
        return _lost()
    if _from_horovod(error) and "Mismatched" in text:
        call = calls.current_call() or "a collective"
        reason = text[text.index("Mismatched") :].split("\n")[0]
        return RanksDisagreeError(
            f"in {call} ({calls.line_of_script()}) the ranks do not send what fits together: "
            f"{reason} Let every rank pass the same shapes and dtypes"
        )
    return None


def _from_horovod(error: BaseException) -> bool:
    from horovod.common.exceptions import HorovodInternalError

    # TensorFlow has a class of its own for each status of an operation.
    return isinstance(error, HorovodInternalError) or type(error).__module__.startswith(
        "tensorflow."
    )


def _lost() -> RankLostError:
    """The error of a rank whose collective was ended."""
    here = calls.current_call() or "a collective"
    line = calls.line_of_script()
    reason = _witness.reason() if _witness else ""
    return RankLostError(reason or f"in {here} ({line}): {_UNKNOWN}")


def mark_as_shown_by(error: E, rank: int) -> E:
    """Note that this rank shows the error with its traceback; on the others a line names it."""
    if _witness is not None and _witness.rank != rank:
        error.hvkit_shown_by = rank  # type: ignore[attr-defined]
    return error


def _line_for(error: BaseException, witness: Witness) -> str | None:
    """The line that stands for an error that another rank shows; None if this rank has to."""
    if not isinstance(error, RankLostError):
        error = meaning_of(error) or error
    other = getattr(error, "hvkit_shown_by", None)
    if other is not None:
        return f"rank {witness.rank} ends with the {type(error).__name__} of rank {other}"
    if not isinstance(error, RankLostError):
        return None
    if witness.printed():
        return f"RankLostError: rank {witness.rank} ends for the reason given by another rank"
    return f"RankLostError: {error}"


def _in_short(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"failed with {type(error).__name__}" + (f": {text[:200]}" if text else "")
