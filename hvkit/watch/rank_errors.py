"""Shows errors that end several ranks: the failed rank's traceback, and a line of each other.

Also translates Horovod's errors, which name neither the rank nor the line of the script.
"""

from __future__ import annotations

import dis
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from hvkit.errors import HvkitError, RankLostError, RanksDisagreeError
from hvkit.host.run_reports import report
from hvkit.log import in_short, interrupted
from hvkit.watch.script_lines import line_of_script, line_of_traceback

if TYPE_CHECKING:
    from hvkit.watch.watcher import Watcher

SAME_CALLS = "every rank has to make the same calls in the same order"
SAME_STEPS = "take the same number of steps (hvkit.shard gives equal parts, unless exact=True)"

_UNKNOWN = (
    "another rank has ended: look for its error above, make the same calls of hvkit on every rank, "
    f"and {SAME_STEPS}"
)

# In the reason for which a rank is lost: the rank whose own error is shown elsewhere.
_FAILED = re.compile(r"; (rank \d+) failed with ")

_watcher: Watcher | None = None  # of this rank; it knows from the others why the run ends
E = TypeVar("E", bound=Exception)

# Packages whose lines at the end of a traceback do not help a user, once hvkit explains the error.
_EXPLAINED = {"hvkit", "torch", "tensorflow", "keras", "horovod"}

# A graph of TensorFlow can raise only TensorFlow's errors. In their text, hvkit's ends before a
# node.
_IN_GRAPH = re.compile(
    r"assertion failed: \[hvkit: (on every rank: )?(FloatingPointError|RanksDisagreeError): (.*?)\]"
    r"\s+\[\[\{\{node ",
    re.DOTALL,
)


def install(watcher: Watcher) -> None:
    """From now on, print an error that is a consequence of another rank's end as one line."""
    global _watcher
    _watcher = watcher
    show = _show_at_once if sys.excepthook is sys.__excepthook__ else sys.excepthook

    def show_or_name(
        error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            meant = _meant(error)
            if not isinstance(meant, RankLostError):
                watcher.failed(_failed_with(meant), ends=True)
            line = _line_for(meant, watcher)
        except Exception as another:
            # A signal handler has raised it just now, such as PyTorch's for a worker that was
            # killed, and it explains the first error.
            error = meant = another
            error_type, traceback, line = type(another), another.__traceback__, None
            watcher.failed(_failed_with(another), ends=True)
        if line is None:
            refused = _raised_by_hvkit(error)
            if refused:  # an argument of the script, which a restart does not change
                report(refused=True)
            if isinstance(meant, HvkitError | FloatingPointError) or refused:
                traceback = _up_to_the_script(traceback)
            if meant is not error:  # TensorFlow's, with the trace of a graph in its text
                error_type, error = type(meant), meant
            show(error_type, error.with_traceback(traceback), traceback)
            return
        print(f"hvkit: {line}", file=sys.stderr, flush=True)
        handled = _handled_before(error)
        if handled is not None:
            print(f"hvkit: rank {watcher.rank} was handling this error:", file=sys.stderr)
            show(type(handled), handled, handled.__traceback__)

    show_of_thread = threading.excepthook

    def show_and_note(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is not None and _line_for(_meant(error), watcher) is None:
            name = arguments.thread.name if arguments.thread else "that has ended"
            watcher.failed(f"failed in thread {name} with {in_short(error)}", ends=False)
        show_of_thread(arguments)

    sys.excepthook = show_or_name
    threading.excepthook = show_and_note


def _show_at_once(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """As Python does, but in one write, so that no line of another rank comes in between."""
    text = "".join(format_exception(error_type, error, trace))
    print(text, end="", file=sys.stderr, flush=True)


def note_uncaught() -> None:
    """At the end of the script: record an error that another excepthook has shown."""
    error = getattr(sys, "last_value", None)
    if _watcher is None or error is None:
        return
    if not isinstance(meant := _meant(error), RankLostError):
        _watcher.failed(_failed_with(meant), ends=True)


def run_ends() -> bool:
    """Whether another rank has ended, or waits in another call, so that waits for it never end."""
    return _watcher is not None and _watcher.run_ends()


# The last error of hvkit that a function has raised which a graph called, until ``meaning_of`` has
# seen what the graph raises for it.
_in_function: list[Exception] = []


@contextmanager
def raised_in_graph() -> Iterator[None]:
    """Wraps a function that a graph calls: ``meaning_of`` what the graph raises is its error."""
    try:
        yield
    except (HvkitError, FloatingPointError) as error:
        _in_function[:] = [_without_frames(error)]
        raise


def _without_frames(error: E) -> E:
    """A copy of an error without the frames that it has passed, which keep the script's values."""
    copy = Exception.__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    return copy


def _raised_in_function(error: BaseException) -> Exception | None:
    """The error in a function for which a graph has raised this one; None for none."""
    if not _from_tensorflow(error):
        return None
    for raised in _in_function:
        if f"{type(raised).__name__}: {raised}" in str(error):
            # Later errors with the same text do not mean it, but this one always does.
            error.hvkit_meaning = raised  # type: ignore[attr-defined]
            _in_function.clear()
    return getattr(error, "hvkit_meaning", None)


def for_graph(error: Exception, *, on_every_rank: bool) -> str:
    """The text for ``tf.debugging.Assert`` in a graph, from which ``meaning_of`` makes the error.

    With ``on_every_rank`` all ranks raise it, so that only rank 0 shows it. Further texts, and
    names of variables, may follow in the same ``Assert``.
    """
    where = "on every rank: " if on_every_rank else ""
    return f"hvkit: {where}{type(error).__name__}: {error}"


def meaning_of(error: BaseException, call: str = "") -> Exception | None:
    """hvkit's error for one of Horovod, of PyTorch's gloo or of a graph; None for any other."""
    if (raised := _raised_in_function(error)) is not None:
        return _without_frames(raised)
    text = str(error)
    if found := _IN_GRAPH.search(text):
        on_every_rank, error_type, said = found.groups()
        said = re.sub(r"\\(.)", lambda c: {"n": "\n"}.get(c[1], c[1]), said.replace("] [", " "))
        disagree = error_type == "RanksDisagreeError"
        meant = RanksDisagreeError(said) if disagree else FloatingPointError(said)
        return mark_as_shown_by(meant, 0) if on_every_rank else meant
    broken = isinstance(error, RuntimeError) and "/gloo/transport/" in text  # a connection
    if broken or re.search("Horovod has (been shut down|not been initialized)", text):
        return lost(call)
    horovods = type(error).__name__ == "HorovodInternalError" or _from_tensorflow(error)
    if horovods and "Mismatched" in text:
        reason = text[text.index("Mismatched") :].split("\n")[0]
        here = f"{call or 'a collective'} ({line_of_script()})"
        return RanksDisagreeError(
            f"in {here} the ranks send different shapes or dtypes: {reason} Pass the same shapes "
            "and dtypes on every rank"
        )
    return None


def _from_tensorflow(error: BaseException) -> bool:
    # TensorFlow has one exception class for each status of an operation.
    return type(error).__module__.startswith("tensorflow.")


def lost(call: str) -> RankLostError:
    """The error of a rank whose collective ended without a result."""
    line = line_of_script()
    reason = _watcher.reason() if _watcher else ""
    return RankLostError(reason or f"in {call or 'a collective'} ({line}): {_UNKNOWN}")


def mark_as_shown_by(error: E, rank: int) -> E:
    """Have ``rank`` show the error with its traceback, and the others one line that names it."""
    if _watcher is not None and _watcher.rank != rank:
        error.hvkit_shown_by = rank  # type: ignore[attr-defined]
    return error


def _meant(error: BaseException) -> BaseException:
    """hvkit's error for one of Horovod or a framework; any other error as it is."""
    return error if isinstance(error, RankLostError) else meaning_of(error) or error


def _line_for(error: BaseException, watcher: Watcher) -> str | None:
    """The line that refers to an error that another rank shows; None if this rank must show it."""
    other = getattr(error, "hvkit_shown_by", None)
    if isinstance(error, KeyboardInterrupt):  # all ranks get it
        entries = [t for t in _each(error.__traceback__) if _package_of(t) not in _EXPLAINED]
        return interrupted(watcher.rank, line_of_traceback(entries[-1]) if entries else "")
    if other is not None:
        return f"rank {watcher.rank} ends with the same {type(error).__name__} as rank {other}"
    if not isinstance(error, RankLostError):
        return None
    shown_by = watcher.shown_by()
    if failed := _FAILED.search(str(error)):
        line = f"rank {watcher.rank} ends for the error of {failed[1]}"
        return line if shown_by is not None else f"{line}: {error}"
    if shown_by is None:
        return f"RankLostError: {error}"
    where = "given above" if shown_by == watcher.rank else f"that rank {shown_by} gives"
    return f"RankLostError: rank {watcher.rank} ends for the reason {where}"


def _up_to_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback of an error that hvkit explains, up to the script's last line.

    Dozens of lines of PyTorch and hvkit would follow. A traceback that ends in another package
    stays whole.
    """
    entries = list(_each(traceback))
    if not entries or _package_of(entries[-1]) not in _EXPLAINED:
        return traceback
    of_script = [n for n, each in enumerate(entries) if _package_of(each) not in _EXPLAINED]
    short = None
    for each in reversed(entries[: of_script[-1] + 1] if of_script else entries):
        short = TracebackType(short, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return short


def _raised_by_hvkit(error: BaseException) -> bool:
    """Whether hvkit has refused an argument with one of Python's own exceptions.

    A bug in hvkit raises them, too, but not by a ``raise`` statement.
    """
    entries = list(_each(error.__traceback__))
    if not entries or not isinstance(error, TypeError | ValueError):
        return False
    last = entries[-1]
    code, at = last.tb_frame.f_code.co_code, last.tb_lasti
    return _package_of(last) == "hvkit" and dis.opname[code[at]] == "RAISE_VARARGS"


def _package_of(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _each(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _handled_before(error: BaseException) -> BaseException | None:
    """The script's own error that it was handling when it made the failed call; None for none."""
    context = error.__context__
    while context is not None and (
        isinstance(context, RankLostError | RanksDisagreeError)
        or meaning_of(context) is not None
        or not is_failure(context)
    ):
        context = context.__context__
    return context


def _failed_with(error: BaseException) -> str:
    return f"failed with {in_short(error)}"


def is_failure(error: BaseException) -> bool:
    """Whether this exception means a failure; the end of an iterator does not."""
    return not isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit)
