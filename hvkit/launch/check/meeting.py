"""All hosts at once try to reach each other, on ports that nobody has opened for them."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkit.host.network import is_local
from hvkit.launch.hosts import Host
from hvkit.launch.printed import values_in
from hvkit.launch.ssh import AT_ONCE, RemoteShell

# Seconds that each host has to start, and then to try the others.
_START = 45.0
_TRY = 45.0
# Bytes of a line; that of a thousand hosts is longer than asyncio's own limit.
_LONGEST_LINE = 2**24


@dataclass(frozen=True)
class Reach:
    """One host trying to reach another.

    Attributes:
        source: name of the host that tried.
        target: name of the host that it tried to reach.
        addresses: what the target's name resolves to at the source.
        failures: why the addresses failed that were tried before one was reached.
        reached: the address under which it was reached; ``None`` if it was not.
        interface: the source's interface.
        own_address: the address of that interface.
    """

    source: str
    target: str
    addresses: tuple[str, ...]
    failures: tuple[str, ...]
    reached: str | None
    interface: str | None
    own_address: str | None


@dataclass(frozen=True)
class Met:
    """What came of it.

    Attributes:
        reaches: each host trying each other one, but for the absent.
        ahead: by host, the seconds that its clock is ahead of this one's, at least.
        absent: names of the hosts that gave no answer in time.
    """

    reaches: tuple[Reach, ...] = ()
    ahead: Mapping[str, float] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


def meet(hosts: Sequence[Host], shell: RemoteShell) -> Met:
    """Let every host try to reach every other one.

    Args:
        hosts: all of them.
        shell: what starts programs there.
    """
    return asyncio.run(_meet(hosts, shell))


async def _meet(hosts: Sequence[Host], shell: RemoteShell) -> Met:
    talks: dict[Host, asyncio.subprocess.Process] = {}
    logins = asyncio.Semaphore(AT_ONCE)

    async def start(host: Host) -> dict[str, Any] | None:
        async with logins:
            talks[host] = await _start(host, shell)
            return await _answer(talks[host], _START)

    try:
        answers = await asyncio.gather(*map(start, hosts))
        started = {
            host: answer for host, answer in zip(hosts, answers, strict=True) if answer is not None
        }
        places = [
            {"name": host.name, "port": answer["port"], "word": answer["word"]}
            for host, answer in started.items()
        ]
        tried = await asyncio.gather(*(_try(talks[host], host, places) for host in started))
    finally:
        await asyncio.gather(*map(_end, talks.values()))
    took_part = {host.name for host, reaches in zip(started, tried, strict=True) if reaches}
    return Met(
        tuple(reach for reaches in tried if reaches for reach in reaches),
        {host.name: answer["time"] - answer["arrived"] for host, answer in started.items()},
        tuple(host.name for host in hosts if host.name not in took_part),
    )


async def _start(host: Host, shell: RemoteShell) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "hvkit.launch.check.talk"]
    local = await asyncio.to_thread(is_local, host.name)
    words = command if local else shell.command(host, command, _START)
    return await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        limit=_LONGEST_LINE,
    )


async def _try(
    talk: asyncio.subprocess.Process, host: Host, places: Sequence[Mapping[str, Any]]
) -> list[Reach] | None:
    others = [place for place in places if place["name"] != host.name]
    if talk.stdin is not None:
        talk.stdin.write(json.dumps(others).encode() + b"\n")
    answer = await _answer(talk, _TRY)
    if answer is None:
        return None
    return [
        Reach(
            host.name,
            one["name"],
            tuple(one["addresses"]),
            tuple(one["failures"]),
            one["reached"],
            one["interface"],
            one["own_address"],
        )
        for one in answer["reached"]
    ]


async def _answer(talk: asyncio.subprocess.Process, timeout: float) -> dict[str, Any] | None:
    """The next line that the program itself printed, and when it came; ``None`` if none comes."""
    try:
        async with asyncio.timeout(timeout):
            while talk.stdout is not None and (line := await talk.stdout.readline()):
                if (values := values_in(line.decode(errors="replace"))) is not None:
                    return {**values, "arrived": time.time()}
    except TimeoutError:
        pass
    return None


async def _end(talk: asyncio.subprocess.Process) -> None:
    if talk.stdin is not None:
        talk.stdin.close()
    try:
        async with asyncio.timeout(5):
            await talk.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(talk.pid, signal.SIGKILL)
        await talk.wait()
