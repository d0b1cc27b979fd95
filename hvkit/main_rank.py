"""Work that one rank does alone, or before the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvkit import runtime
from hvkit.communication.collectives import raise_together
from hvkit.errors import RankLostError, RanksDisagreeError
from hvkit.log import logger
from hvkit.runtime import Group
from hvkit.watch.calls import call

_NAME = "hvkit.main_first"

_inside = False
_logged: set[str] = set()


def is_main() -> bool:
    """Whether this is rank 0, which prints and writes the files of the whole run.

    ``if hvkit.is_main(): torch.save(model.state_dict(), "model.pt")``. Call no collective in such a
    branch: the other ranks never enter it.
    """
    return runtime.rank() == 0


def warn_once(topic: str, text: str, group: Group | None = None) -> None:
    """Log a warning on the first rank of a group, or of all, unless it has had one on the topic."""
    first = is_main() if group is None else group.rank == 0
    if topic not in _logged and first:
        logger.warning(text)
    _logged.add(topic)


@contextmanager
def main_first() -> Iterator[None]:
    """Run the body on rank 0 first, then on the other ranks: for downloads and caches.

        with hvkit.main_first():
            data = datasets.MNIST("data", download=True)  # rank 0 downloads, the others find it

    After rank 0, one rank of every other host runs it, then all remaining ranks at the same time.
    So no two ranks fill the same folder together, whether the hosts share it or not.

    A collective: every rank must enter, and none leaves before all have run the body. The body must
    not call collectives, since the ranks run it at different times. A nested ``main_first`` has no
    effect. With one process the body just runs.

    Raises:
        Exception: the body failed on a rank. Every rank raises that error, and ranks that had not
            started the body skip it. A TypeError, ValueError or OSError keeps its type; any other
            becomes HvkitError on the other ranks.
    """
    global _inside
    if runtime.size() == 1 or _inside:
        yield
        return
    on_one_host = runtime.local_size() == runtime.size()
    last = 1 if on_one_host else 2
    turn = 0 if runtime.rank() == 0 else 1 if runtime.local_rank() == 0 else last
    for _ in range(turn):
        _end_turn(None)
    _inside = True
    problem = None
    try:
        yield
    except (RanksDisagreeError, RankLostError):
        # The body called a collective, and the ranks that wait here got its error as well.
        raise
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    finally:
        _inside = False
    _end_turn(problem)
    for _ in range(turn, last):
        _end_turn(None)


def _end_turn(problem: Exception | None) -> None:
    with call(_NAME):
        raise_together(problem, "main_first")
