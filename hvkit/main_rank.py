"""What one rank does alone, or before the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvkit import runtime
from hvkit.collectives import raise_together
from hvkit.errors import RankLostError, RanksDisagreeError
from hvkit.log import logger
from hvkit.watch.calls import call

_NAME = "hvkit.main_first"

_inside = False
_said: set[str] = set()


def is_main() -> bool:
    """Whether this is rank 0, which alone prints and writes files that all ranks would write.

    ``if hvkit.is_main(): torch.save(model.state_dict(), "model.pt")``. Nothing in such a branch may
    be a collective: the other ranks do not come to it.
    """
    return runtime.rank() == 0


def say_once(kind: str, text: str) -> None:
    """Say something on rank 0, unless something of this kind was said before."""
    if kind not in _said and is_main():
        logger.warning(text)
    _said.add(kind)


@contextmanager
def main_first() -> Iterator[None]:
    """Run the body on rank 0 first, then on the others: for downloads and caches.

    ::

        with hvkit.main_first():
            data = datasets.MNIST("data", download=True)  # rank 0 downloads, the others find it

    After rank 0 comes one rank of every other host, and then all the rest at the same time. So no
    two ranks fill one folder together, whether the hosts share it or each has its own.

    A collective: every rank enters it, and leaves it when all have run the body. The body may not
    call collectives, because the ranks are not in it together; another ``main_first`` inside it
    changes nothing. On one process the body just runs.

    Raises:
        Exception: what the body raised on a rank, on every rank; those whose turn comes later do
            not run it. Its type is kept if it is a TypeError, ValueError or OSError; others become
            HvkitError on the other ranks.
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
        # Of a collective in the body: the others, who wait for this rank, have it already.
        raise
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    finally:
        _inside = False
    _end_turn(problem)
    for _ in range(turn, last):
        _end_turn(None)


def _end_turn(problem: Exception | None) -> None:
    with call(_NAME):
        raise_together(problem, "main_first")
