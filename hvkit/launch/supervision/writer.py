"""Writes what ranks print, apart from everything else."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

_Work = tuple[Callable[[], None], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Writer:
    """A thread that writes, so that a slow terminal holds up its ranks and nothing else.

    A daemon: one that takes nothing any more does not hold up the end of this process.

    Args:
        on_problem: called in the event loop when something cannot be written.
    """

    def __init__(self, on_problem: Callable[[], None]) -> None:
        self.problem: OSError | None = None
        self._on_problem = on_problem
        self._waiting: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def do(self, work: Callable[[], None]) -> None:
        """Do it after all that was asked for before; nothing more is done after a problem."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._waiting.put((work, loop, done))
        await done

    def fail(self, problem: OSError) -> None:
        """Note that something cannot be written; in the event loop."""
        if self.problem is None:
            self.problem = problem
            self._on_problem()

    def _run(self) -> None:
        while True:
            work, loop, done = self._waiting.get()
            try:
                if self.problem is None:
                    work()
            except OSError as problem:
                self._tell(loop, self.fail, problem)
            self._tell(loop, _finish, done)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, what: Callable[..., None], about: object
    ) -> None:
        # The loop may have ended while this thread was in a write that took long.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(what, about)


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.set_result(None)
