"""The end of the agents' connections in ``hvkit run``: collects output and failures."""

import asyncio
import functools
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvkit.launch.supervision import protocol
from hvkit.launch.supervision.first_failure import Failure
from hvkit.launch.supervision.output import RankOutput, Style, Writer, show
from hvkit.launch.supervision.protocol import Kind, asked_every, keep_alive, silent_for

# Seconds that something which has connected has to say who it is.
_HELLO = 10.0
# So often a host was asked without an answer when it may be lost.
_DOUBT = 2.5


@dataclass
class _Rank:
    number: int
    host: str
    output: RankOutput
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: bool = False
    ended: bool = False

    def tell(self, kind: Kind, number: int) -> None:
        self.writer.write(protocol.frame(kind, protocol.packed(number)))


@dataclass
class Supervisor:
    """Listens to the agents of one run.

    Attributes:
        size: the number of ranks.
        key: the key of the run, in hexadecimal.
        style: how output is shown.
        lost_after: seconds without a sign of life after which a host is given up; ``None`` for
            never.
        on_failure: called after each failure of a rank, and when output cannot be written.
        all_ended: set when all ranks have told how they ended.
        host_lost: whether an agent was given up.
        failures: the failures so far, in the order in which they became known.
    """

    size: int
    key: str
    style: Style
    lost_after: float | None
    on_failure: Callable[[], None]
    all_ended: asyncio.Event = field(default_factory=asyncio.Event)
    host_lost: bool = False
    failures: list[Failure] = field(default_factory=list)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _connected: set[int] = field(default_factory=set)
    _all_gone: asyncio.Event = field(default_factory=asyncio.Event)
    _grace: float | None = None
    _interrupted: bool = False

    def __post_init__(self) -> None:
        self.writer = Writer(self.on_failure)

    async def listen(self, address: str | None) -> asyncio.Server:
        """Listen on any free port of an address; ``None`` for all addresses."""
        self._all_gone.set()
        server = await asyncio.start_server(self._serve, address, 0)
        for listening in server.sockets:
            # What is accepted has the same.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, protocol.RECEIVE_BUFFER)
        return server

    @property
    def started(self) -> int:
        """How many ranks have connected so far."""
        return len(self._ranks)

    @property
    def elsewhere(self) -> set[str]:
        """The hosts of the ranks, but for this one."""
        return {rank.host for rank in self._ranks.values()} - {socket.gethostname()}

    async def show_begun_lines(self) -> None:
        """Show every second what ranks have printed so far of a line; never returns."""
        while True:
            await asyncio.sleep(1)
            await self.writer.do(self._flush)

    @property
    def in_doubt(self) -> bool:
        """Whether a host has been silent for so long that it may be lost."""
        doubt = _DOUBT * asked_every(self.lost_after or 0.0)
        return any(self._silent_for(self._ranks[number]) > doubt for number in self._connected)

    def _silent_for(self, rank: _Rank) -> float:
        connection: socket.socket | None = rank.writer.get_extra_info("socket")
        if self.lost_after is None or connection is None or rank.writer.is_closing():
            return 0.0
        return silent_for(connection)

    def stop(self, grace: float) -> None:
        """Tell all agents to end what they run, by force after so many seconds."""
        self._grace = grace
        self._tell_all(Kind.STOP, round(grace * 1000))

    def interrupt(self) -> None:
        """Have all agents send their commands SIGINT."""
        self._interrupted = True
        self._tell_all(Kind.INTERRUPT, 0)

    def signal(self, number: int) -> None:
        """Have all agents send their commands a signal."""
        self._tell_all(Kind.SIGNAL, number)

    async def all_gone(self, timeout: float) -> bool:
        """Wait until no agent is connected; whether that came true within ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._all_gone.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Show what ranks had begun to print, and close their log files."""
        for rank in self._ranks.values():
            await self.writer.do(rank.output.close)

    def _flush(self) -> None:
        for rank in list(self._ranks.values()):
            rank.output.flush()

    def _tell_all(self, kind: Kind, number: int) -> None:
        for rank in self._connected:
            self._ranks[rank].tell(kind, number)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        try:
            rank = await self._greeted(reader, writer)
            if rank is not None:
                await self._follow(rank)
        except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError, ValueError):
            if rank is not None and not rank.ended:
                self._fail(rank, None)
        except OSError:
            # The kernel's word, see :mod:`.liveness`; or nobody who said hello.
            if rank is not None and not rank.ended:
                self.host_lost = True
                last_heard = time.monotonic() - (self.lost_after or 0.0)
                self._fail(rank, None, lost=True, at=last_heard)
        except asyncio.CancelledError:
            # At the end of the run, where output is not taken any more.
            return
        finally:
            writer.close()
            if rank is not None:
                self._connected.discard(rank.number)
                if not self._connected:
                    self._all_gone.set()

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Rank | None:
        """The rank that has connected, if it knows the key."""
        nonce = secrets.token_bytes(protocol.NONCE_BYTES)
        writer.write(nonce)
        async with asyncio.timeout(_HELLO):
            kind, payload = await _frame(reader, protocol.LONGEST_HELLO)
        try:
            hello = json.loads(payload) if kind is Kind.HELLO else {}
            number, host, proof = int(hello["rank"]), str(hello["host"]), str(hello["proof"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            # Not of an agent: anybody may connect.
            return None
        if not hmac.compare_digest(proof.encode(), protocol.proof(self.key, nonce).encode()):
            return None
        if number in self._ranks or not 0 <= number < self.size:
            return None
        try:
            output = RankOutput(number, host, self.style, show)
        except OSError as problem:
            self.writer.fail(problem)
            return None
        keep_alive(writer.get_extra_info("socket"), self.lost_after)
        rank = self._ranks[number] = _Rank(number, host, output, reader, writer)
        self._connected.add(number)
        self._all_gone.clear()
        if self._grace is not None:
            rank.tell(Kind.STOP, round(self._grace * 1000))
        elif self._interrupted:
            rank.tell(Kind.INTERRUPT, 0)
        return rank

    async def _follow(self, rank: _Rank) -> None:
        while True:
            kind, payload = await _frame(rank.reader)
            if kind in (Kind.STDOUT, Kind.STDERR):
                await self.writer.do(functools.partial(rank.output.write, kind, payload))
                rank.tell(Kind.TAKEN, protocol.HEADER_BYTES + len(payload))
            elif kind is Kind.ASKED:
                rank.asked = True
            elif kind is Kind.ENDED:
                rank.ended = True
                if sum(one.ended for one in self._ranks.values()) == self.size:
                    self.all_ended.set()
                how = json.loads(payload)
                if how["status"] != 0:
                    rank.asked = how.get("asked", False)
                    at = time.monotonic() - how.get("ago", 0.0)
                    self._fail(rank, how["status"], how.get("problem"), at=at)
                return

    def _fail(
        self,
        rank: _Rank,
        status: int | None,
        problem: str | None = None,
        *,
        at: float | None = None,
        lost: bool = False,
    ) -> None:
        self.failures.append(
            Failure(
                rank=rank.number,
                host=rank.host,
                status=status,
                at=time.monotonic() if at is None else at,
                problem=problem,
                last_lines=tuple(rank.output.last_lines()),
                asked=rank.asked or self._interrupted or self._grace is not None,
                lost=lost,
            )
        )
        self.on_failure()


async def _frame(
    reader: asyncio.StreamReader, longest: int = protocol.LONGEST_FRAME
) -> tuple[Kind, bytes]:
    kind, length = protocol.header(await reader.readexactly(protocol.HEADER_BYTES), longest)
    return kind, await reader.readexactly(length)
