"""Whether the hosts reach each other: every host opens TCP connections to every other one.

Each host listens on a free port, as ranks do, so a firewall that blocks unknown ports is found.
Every host runs ``python -m hvkit.launching.reachability``, and ``connect_all`` on this
host exchanges lines of JSON with all of them:

1. each host prints its port, a random token and its time;
2. it reads a line with the names, ports and tokens of the others;
3. it connects to all of them and prints the results. A host sends its token to whoever connects,
   so a name that leads to another host, or back to the same one, is noticed;
4. it keeps listening until its standard input ends.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkit.host.network import addresses_of, is_local, name_of_interface
from hvkit.launching.hosts import Host
from hvkit.launching.probe import json_line, read_line
from hvkit.launching.ssh import AT_ONCE, RemoteShell

# Seconds for each host to start, and then to connect to the others.
_START = 45.0
_TRY = 45.0
# Seconds for one connection.
_CONNECT = 5.0
# Seconds after which the program on a host ends in any case, even if that host is cut off.
_LIFETIME = 300
# Bytes of a line. The line of a thousand hosts is longer than asyncio's own limit.
_LONGEST_LINE = 2**24

ANOTHER_ANSWERS = "another host answers"


@dataclass(frozen=True)
class Reach:
    """The attempt of one host to reach another."""

    source: str
    target: str
    addresses: Sequence[str]  # of the target's name at the source
    failures: Sequence[str]  # why each address failed that was tried before one succeeded
    reached: str | None  # the address that succeeded
    interface: str | None  # the source's
    own_address: str | None  # of that interface


@dataclass(frozen=True)
class Reachability:
    """The attempts of all hosts to reach each other."""

    reaches: tuple[Reach, ...] = ()  # for every ordered pair of hosts, without the absent ones
    # By host, the seconds that its clock is at least ahead of this host's.
    ahead: Mapping[str, float] = field(default_factory=dict)
    absent: tuple[str, ...] = ()  # the hosts without results in time


def connect_all(hosts: Sequence[Host], shell: RemoteShell) -> Reachability:
    """Let every host try to reach every other one."""
    return asyncio.run(_connect_all(hosts, shell))


async def _connect_all(hosts: Sequence[Host], shell: RemoteShell) -> Reachability:
    programs: dict[Host, asyncio.subprocess.Process] = {}
    logins = asyncio.Semaphore(AT_ONCE)

    async def start(host: Host) -> dict[str, Any] | None:
        async with logins:
            programs[host] = await _start(host, shell)
            return await _next_line(programs[host], _START)

    try:
        lines = await asyncio.gather(*map(start, hosts))
        started = {host: line for host, line in zip(hosts, lines, strict=True) if line is not None}
        listening = [
            {"name": host.name, "port": line["port"], "token": line["token"]}
            for host, line in started.items()
        ]
        tried = await asyncio.gather(*(_try(programs[host], host, listening) for host in started))
    finally:
        await asyncio.gather(*map(_end, programs.values()))
    took_part = {host.name for host, reaches in zip(started, tried, strict=True) if reaches}
    return Reachability(
        tuple(reach for reaches in tried if reaches for reach in reaches),
        {host.name: line["time"] - line["arrived"] for host, line in started.items()},
        tuple(host.name for host in hosts if host.name not in took_part),
    )


async def _start(host: Host, shell: RemoteShell) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "hvkit.launching.reachability"]
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
    program: asyncio.subprocess.Process, host: Host, listening: Sequence[Mapping[str, Any]]
) -> list[Reach] | None:
    """Send a host what it needs to reach the others; its attempts, ``None`` if it prints none."""
    others = [each for each in listening if each["name"] != host.name]
    if program.stdin is not None:
        program.stdin.write(json.dumps(others).encode() + b"\n")
    line = await _next_line(program, _TRY)
    return None if line is None else [Reach(host.name, **one) for one in line["reached"]]


async def _next_line(program: asyncio.subprocess.Process, timeout: float) -> dict[str, Any] | None:
    """The next line of a host's program, with its time of arrival; ``None`` if none comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while program.stdout is not None and (line := await program.stdout.readline()):
                if (values := read_line(line.decode(errors="replace"))) is not None:
                    return {**values, "arrived": time.time()}
    return None


async def _end(program: asyncio.subprocess.Process) -> None:
    if program.stdin is not None:
        program.stdin.close()
    try:
        async with asyncio.timeout(5):
            await program.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await program.wait()


async def _connect_to_others() -> None:
    """The program on each host."""
    token = secrets.token_hex(8)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(f"{token}\n".encode())
            await writer.drain()
            writer.close()

    listening = socket.create_server(("", 0))
    async with await asyncio.start_server(greet, sock=listening):
        _print({"port": listening.getsockname()[1], "token": token, "time": time.time()})
        others = json.loads(await asyncio.to_thread(sys.stdin.readline))
        _print({"reached": await asyncio.gather(*map(_reach, others))})
        await asyncio.to_thread(sys.stdin.read)


async def _reach(other: Mapping[str, Any]) -> dict[str, Any]:
    """Try the IPv4 addresses of a name in turn, until that host answers with its token."""
    known = await asyncio.to_thread(addresses_of, other["name"])
    addresses = [str(address) for address in known if address.version == 4]
    failures: list[str] = []
    found: dict[str, Any] = {"target": other["name"], "addresses": addresses, "failures": failures}
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT):
                reader, writer = await asyncio.open_connection(address, other["port"])
                token = (await reader.readline()).decode(errors="replace").strip()
        except TimeoutError:
            failures.append("timed out")
            continue
        except OSError as error:
            # asyncio replaces the system's text by its own.
            failures.append(os.strerror(error.errno).lower() if error.errno else str(error))
            continue
        source = writer.get_extra_info("sockname")[0]
        writer.close()
        if token == other["token"]:
            interface = name_of_interface(source)
            return {**found, "reached": address, "own_address": source, "interface": interface}
        failures.append(ANOTHER_ANSWERS)
    return {**found, "reached": None, "interface": None, "own_address": None}


def _print(values: Mapping[str, Any]) -> None:
    print(json_line(values), flush=True)


if __name__ == "__main__":
    signal.alarm(_LIFETIME)
    asyncio.run(_connect_to_others())
