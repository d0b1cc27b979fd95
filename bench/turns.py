"""Peers take turns: one trains for a moment while the processes of all others are stopped.

The speed of a shared machine changes within a minute. Turns of a fraction of a second make the
peers of one round meet the same machine.
"""

import os
import signal
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PATIENCE = 300  # seconds
_STEPS, _SECONDS = struct.Struct("i"), struct.Struct("d")


def horovod_as_published():
    """Leave out what makes hvkit's build of Horovod faster, before ``hvd.init()`` sets it."""
    off = dict.fromkeys(("HVKIT_BLOCKING_WAITS", "HVKIT_OWN_COLLECTIVES"), "0")
    off["OMPI_MCA_mpi_yield_when_idle"] = "0"
    # hvkit leaves the allocator alone if the user has set a variable of it.
    os.environ.update(off, MALLOC_ARENA_TEST="8")


class Turns:
    """A rank's turns: yields before each step, and times all steps of a turn but the first.

    Args:
        path: of the socket at which the bench listens.
        finish: waits until the steps so far are done, if they go on in the background.
    """

    def __init__(self, path, finish=lambda: None):
        self._finish = finish
        self._bench = socket.socket(socket.AF_UNIX)
        self._bench.connect(path)
        self._bench.sendall(_STEPS.pack(os.getpid()))

    def __iter__(self):
        while steps := _STEPS.unpack(_received(self._bench, _STEPS.size))[0]:
            yield  # brings data back into caches, and ranks to the same step
            self._finish()
            start = time.perf_counter()
            for _ in range(steps):
                yield
            self._finish()
            self._bench.sendall(_SECONDS.pack((time.perf_counter() - start) / steps))


class Peer:
    """The ranks of one peer, stopped except in its turns; a context that ends them.

    Args:
        ranks: how many there are.
        start: starts them with the path of a socket as their last argument, and an open file for
            what they print; returns their processes or launchers.
    """

    def __init__(self, ranks, start):
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        path = f"{self._folder.name}/turns"
        self._started, self._ranks, self._pids = [], [], []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            listener.settimeout(1)
            with self._output.open("w") as output:
                self._started = start(path, output)
            begun = time.monotonic()
            while len(self._ranks) < ranks:
                self._refuse_end(time.monotonic() - begun)
                try:
                    rank = listener.accept()[0]
                except TimeoutError:
                    continue
                rank.settimeout(_PATIENCE)
                self._ranks.append(rank)
                self._pids.append(_STEPS.unpack(_received(rank, _STEPS.size))[0])
        self.take(1)

    def take(self, steps):
        """Let the ranks take one step, and then some; seconds a step, of the slowest rank."""
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            rank.sendall(_STEPS.pack(steps))
        taken = [_SECONDS.unpack(_received(rank, _SECONDS.size))[0] for rank in self._ranks]
        self._signal(signal.SIGSTOP)
        return max(taken)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind:
            for each in self._started:
                each.terminate()
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            with suppress(BrokenPipeError):
                rank.sendall(_STEPS.pack(0))
        for each in self._started:
            each.wait(_PATIENCE)
        self._folder.cleanup()

    def _signal(self, number):
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _refuse_end(self, seconds):
        """End the bench if a peer does not start."""
        codes = [each.poll() for each in self._started]
        if any(code is not None for code in codes) or seconds > _PATIENCE:
            for each in self._started:
                each.terminate()
            output = self._output.read_text()[-3000:]
            sys.exit(f"{self._started[0].args} did not start (exit status {codes}):\n{output}")


def _received(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side of a turn has ended")
        data += more
    return data
