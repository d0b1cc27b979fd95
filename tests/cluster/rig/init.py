"""The first process of a namespace of processes: ``python init.py HOSTNAME``.

It ends when its standard input does, that is with the process that holds the other end; the
kernel then kills every process of the namespace.
"""

import os
import signal
import socket
import sys


def main(hostname: str) -> None:
    # The kernel reaps the children of a process that ignores SIGCHLD, here: orphans.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    socket.sethostname(hostname)
    os.write(sys.stdout.fileno(), b"ready\n")
    while os.read(sys.stdin.fileno(), 1):
        pass


if __name__ == "__main__":
    main(sys.argv[1])
