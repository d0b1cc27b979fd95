"""Ranks without MPI read what was sent, or say why not."""

import http.server
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from hvkit.connections import connect, frame
from hvkit.errors import LaunchError, RankLostError, RanksDisagreeError
from hvkit.transport.jax_engine import TcpCollectives, _LauncherStore
from hvkit.transport.mailbox import TcpMailbox

KEY = b"k" * 32


def mailboxes(*keys):
    """Of as many ranks, all in this process; each knows one of the keys."""
    boxes = [TcpMailbox(rank, key, True, lambda: False) for rank, key in enumerate(keys)]
    for box in boxes:
        box.addresses = [each.address for each in boxes]
    return boxes


@pytest.mark.parametrize(("sent", "expected"), [(1, 8), (8, 1), (4, 8)])
def test_a_message_of_another_length_is_refused(sent, expected):
    first, second = mailboxes(KEY, KEY)
    first.send(np.ones(sent, np.uint8), to=1, tag=0, purpose="objects")
    with pytest.raises(RanksDisagreeError, match=f"sent {sent} bytes where rank 1 expects"):
        second.receive(np.zeros(expected, np.uint8), source=0, tag=0)


def test_a_rank_with_another_key_is_named():
    first, _ = mailboxes(KEY, b"another")
    with pytest.raises(LaunchError, match=r"rank 0 cannot connect to rank 1.*did not prove"):
        first.send(np.ones(1), to=1, tag=0, purpose="objects")


def test_a_connection_that_ends_within_a_message_ends_the_wait():
    _, second = mailboxes(KEY, KEY)
    addresses, port = second.addresses[1]
    with connect(addresses, port, KEY) as sender:
        sender.sendall(frame(0) + frame(0, bytes(1000))[:20])
    with pytest.raises(RankLostError):
        second.receive(np.zeros(1000, np.uint8), source=0, tag=0)


class InOneProcess(TcpCollectives):
    """The collectives of a rank whose mailbox is at hand."""

    def __init__(self, rank, size, mailbox):
        self.rank, self.size, self._mailbox, self._at_its_end = rank, size, mailbox, False
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_who_broadcasts_a_large_array_waits_until_all_have_it(size):
    boxes = mailboxes(*[KEY] * size)
    ranks = [InOneProcess(rank, size, box) for rank, box in enumerate(boxes)]
    array = np.arange(1 << 20, dtype=np.uint8)
    with ThreadPoolExecutor(size) as pool:
        *others, last = (partial(each.broadcast, array * (each.rank == 0), 0) for each in ranks)
        first = [pool.submit(other) for other in others]
        boxes[-1].wait()  # it has come, and only the last rank has not called for it
        with pytest.raises(TimeoutError):
            first[0].result(0.5)
        for done in [*first, pool.submit(last)]:
            np.testing.assert_array_equal(done.result(20), array)


@pytest.fixture
def store(monkeypatch):
    """A server of HTTP that refuses everyone, at the address of the launcher's store."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(403)

        do_PUT = do_GET

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Refuses)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_address[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_store_that_refuses_or_has_ended_is_named(store):
    with pytest.raises(LaunchError, match=r"addresses, 127\.0\.0\.1:\d+, answers 403"):
        _LauncherStore().put("address-1", b"")
    store.shutdown()
    store.server_close()
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1:\d+, cannot be reached"):
        _LauncherStore().get("key", "rank 0")
