"""Run a command on the first of several hosts, which are made for it on this machine.

As root::

    python tests/cluster/on_rig.py --hosts 4 -- ssh node3 hostname
    python tests/cluster/on_rig.py --hosts 2 --slots 2 -- mpirun --hostfile /etc/hostfile hostname
    python tests/cluster/on_rig.py --hosts 2 --bandwidth 100mbit   # a shell on node1
"""

import argparse
import os
import shutil
import signal
import sys

from rig import Rig, RigError, missing

from hvkit.cli.arguments import positive

_HOSTFILE = "/etc/hostfile"


def main() -> int:
    """Run what the command line says and return its exit status; 1 where there are no hosts."""
    args = _parser().parse_args()
    if lacks := missing():
        print("on_rig.py: no hosts on this machine: " + "; ".join(lacks), file=sys.stderr)
        return 1
    names = [f"node{number}" for number in range(1, args.hosts + 1)]
    try:
        with Rig(names, bandwidth=args.bandwidth, delay=args.delay, ipv6=args.ipv6) as rig:
            hostfile = "".join(f"{name} slots={args.slots}\n" for name in names)
            for host in rig.hosts:
                host.run(["tee", _HOSTFILE], input=hostfile).check_returncode()
            return _run(rig, args.command or [shutil.which("bash") or "sh"])
    except RigError as error:
        print(f"on_rig.py: {error}", file=sys.stderr)
        return 1


def _run(rig: Rig, command: list[str]) -> int:
    environment = {"TERM": os.environ.get("TERM", "dumb"), "PS1": r"\h:\w\$ "}
    # A Ctrl-C reaches the command as well; the hosts stay until it has ended.
    signal.signal(signal.SIGINT, lambda *_: None)
    status: int = rig.hosts[0].popen(command, env=environment, cwd=os.getcwd()).wait()
    return status if status >= 0 else 128 - status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make hosts node1, node2, ... on this machine, with ssh between them, and run "
        "a command on node1, or a shell. They have this machine's files, but a home and a /etc of "
        "their own, and end with the command. Root is needed.",
    )
    parser.add_argument(
        "--hosts", type=positive, default=2, metavar="N", help="so many (default: 2)"
    )
    parser.add_argument(
        "--slots",
        type=positive,
        default=1,
        metavar="N",
        help=f"slots of each host in the hostfile that they all have, {_HOSTFILE} (default: 1)",
    )
    parser.add_argument(
        "--bandwidth", metavar="RATE", help="limit to each host's link, each way: 100mbit"
    )
    parser.add_argument(
        "--delay", metavar="TIME", help="how much later packets to and from a host arrive: 5ms"
    )
    parser.add_argument("--ipv6", action="store_true", help="give hosts IPv6 addresses, too")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --, with arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
