"""What runs on each host while the hosts try to reach each other.

``python -m hvkit.launch.check.talk`` listens on a free port and prints a line with it; reads from
stdin a line with the other hosts and their ports; tries them all and prints a line with what came
of it; and listens on until stdin ends. All lines are JSON. Who connects is sent a random word and
nothing else, by which the others know that they have reached this host and not, say, themselves.
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
from collections.abc import Mapping
from typing import Any

from hvkit.host.network import addresses_of, interfaces
from hvkit.launch.printed import line_of

# Seconds for one connection, and after which this program ends itself whatever happens: nothing is
# to stay behind on a host that the network has lost.
_CONNECT = 5.0
_LIFETIME = 300

ANOTHER_ANSWERS = "another host answers"


async def talk() -> None:
    """Meet the other hosts; see above."""
    word = secrets.token_hex(8)

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(f"{word}\n".encode())
            await writer.drain()
            writer.close()

    listening = _socket()
    async with await asyncio.start_server(tell, sock=listening):
        _print({"port": listening.getsockname()[1], "word": word, "time": time.time()})
        others = json.loads(await asyncio.to_thread(sys.stdin.readline))
        _print({"reached": await asyncio.gather(*map(_reach, others))})
        await asyncio.to_thread(sys.stdin.read)


async def _reach(other: Mapping[str, Any]) -> dict[str, Any]:
    """Try one host, by all addresses that its name has here, until one answers as that host."""
    addresses = [str(address) for address in await asyncio.to_thread(addresses_of, other["name"])]
    failures: list[str] = []
    found: dict[str, Any] = {"name": other["name"], "addresses": addresses, "failures": failures}
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT):
                reader, writer = await asyncio.open_connection(address, other["port"])
                word = (await reader.readline()).decode(errors="replace").strip()
        except TimeoutError:
            failures.append("timed out")
            continue
        except OSError as error:
            # asyncio puts a text of its own in the place of the system's.
            failures.append(os.strerror(error.errno).lower() if error.errno else str(error))
            continue
        own_address = writer.get_extra_info("sockname")[0]
        writer.close()
        if word == other["word"]:
            return {**found, "reached": address, **_from(own_address)}
        failures.append(ANOTHER_ANSWERS)
    return {**found, "reached": None, "interface": None, "own_address": None}


def _from(address: str) -> dict[str, str | None]:
    """This host's own address in a connection, and its interface."""
    # On a socket for both families an IPv4 address has this prefix.
    address = address.removeprefix("::ffff:").partition("%")[0]
    name = next((one.name for one in interfaces() if one.address == address), None)
    return {"own_address": address, "interface": name}


def _socket() -> socket.socket:
    """A listening socket on all addresses of this host."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _print(line: Mapping[str, Any]) -> None:
    print(line_of(line), flush=True)


if __name__ == "__main__":
    signal.alarm(_LIFETIME)
    asyncio.run(talk())
