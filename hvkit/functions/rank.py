"""The program of each rank of ``hvkit.launch``: ``python -m hvkit.functions.rank``.

It calls the function that is in the folder ``CALL_VARIABLE``, and leaves there what the function
returns or raises. An exception ends the process like one of a script.

It is also the main module of processes that the function starts with multiprocessing, such as
workers: with ``spawn`` and ``forkserver`` these run the main module again, as ``__mp_main__``, and
find there the functions and classes of the caller's ``__main__`` that the rank has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]
from traceback import format_exception
from types import TracebackType

from hvkit.errors import RankLostError
from hvkit.functions.outcomes import from_function, save_error, save_result
from hvkit.functions.pickling import read_call, read_main
from hvkit.host.rank_variables import launched_rank
from hvkit.launching.supervision.protocol import CALL_VARIABLE, call_in, outcome_in


def command_of_rank(
    function: Callable[..., object], module: str = "hvkit.functions.rank"
) -> list[str]:
    """The command of each rank; the function's name is there for ``hvkit top``.

    ``module`` is this one, or another whose ``main`` calls this one's.
    """
    name = getattr(function, "__name__", "")
    named = [name] if name.isidentifier() else []
    # Python's own options, such as -O, -W and -X, as multiprocessing passes them on.
    flags = _args_from_interpreter_flags()
    return [sys.executable, *flags, "-P", "-m", module, *named]


def main() -> None:
    """Call the function; raises what it raises."""
    sys.excepthook = _show
    folder, here = Path(os.environ[CALL_VARIABLE]), launched_rank(os.environ)
    assert here is not None, "the agent has checked that"
    outcome = outcome_in(folder, here.rank)
    try:
        with call_in(folder).open("rb") as file:
            function, args, kwargs = read_call(file)
        save_result(outcome, function(*args, **kwargs))
    except SystemExit as end:
        if end.code in (None, 0):  # a script that ends so has ended well
            save_result(outcome, None)
        elif isinstance(end.code, str):
            text = f"rank {here.rank} on {gethostname()} ended by sys.exit: {end.code}"
            save_error(outcome, here.rank, RankLostError(text))
        raise
    except KeyboardInterrupt:  # Ctrl-C there is Ctrl-C here, and of the ranks none failed first
        raise
    except BaseException as error:
        save_error(outcome, here.rank, error)
        raise


def _show(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """As Python does, from the function on, and in one write."""
    text = "".join(format_exception(error_type, error, from_function(trace)))
    print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    with call_in(Path(os.environ[CALL_VARIABLE])).open("rb") as call:
        globals().update(read_main(call))
