"""Shows the output of a process in this one's ``sys.stdout`` and ``sys.stderr``, until it ends.

A notebook replaces these two, and has no terminal that the process could write to.
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TextIO

_READ = 1 << 16


def follow(process: subprocess.Popen[bytes]) -> None:
    """Show what a process prints until it ends.

    A KeyboardInterrupt is passed on to the process as SIGINT, as often as it comes, and raised when
    the process has ended. After any other exception, such as one of a ``sys.stdout`` that cannot
    be written, the process gets SIGTERM.

    Args:
        process: with pipes as both streams.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    interrupted: KeyboardInterrupt | None = None
    make = codecs.getincrementaldecoder("utf-8")
    decoders = {"stdout": make("replace"), "stderr": make("replace")}
    with selectors.DefaultSelector() as selector, process:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        try:
            while True:
                try:
                    _show(selector, decoders)
                    process.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    interrupted = interrupted or interrupt
                    process.send_signal(signal.SIGINT)
        except BaseException:
            process.terminate()
            _drop(selector)
            raise
    if interrupted is not None:
        raise interrupted.with_traceback(None)


def _show(
    selector: selectors.BaseSelector, decoders: Mapping[str, codecs.IncrementalDecoder]
) -> None:
    """Show both streams until their ends."""
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, _READ)
            _print(getattr(sys, key.data), decoders[key.data].decode(data, final=not data))
            if not data:
                selector.unregister(key.fileobj)


def _print(stream: TextIO | None, text: str) -> None:
    """Print to one of this process's streams: nothing to one that is closed, as ``print`` does."""
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:  # ranks may print what Latin-1, for instance, does not have
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
    stream.flush()


def _drop(selector: selectors.BaseSelector) -> None:
    """Read both streams to their ends, so that the process can write and end."""
    while selector.get_map():
        for key, _ in selector.select():
            if not os.read(key.fd, _READ):
                selector.unregister(key.fileobj)
