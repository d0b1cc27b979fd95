"""The sockets between rank 0 and the others let in those who know the secret, and only those."""

import queue
import socket
import threading
import time

import pytest

from hvkit.watch import channel
from hvkit.watch.calls import Status


@pytest.fixture
def listener():
    listener = channel.RankListener(one_host=True)
    yield listener
    listener.close()


@pytest.fixture
def admitted(listener):
    """A queue of the ranks that the listener lets in, with their connections."""
    found = queue.SimpleQueue()
    serving = threading.Thread(target=listener.serve, args=(lambda *who: found.put(who),))
    serving.start()
    yield found
    listener.close()
    serving.join(20)
    assert not serving.is_alive()


@pytest.fixture
def both_ends(listener, admitted):
    """Of a rank's connection to rank 0."""
    there = channel.connect(listener.endpoint, 3)
    rank, here = admitted.get(timeout=20)
    assert rank == 3
    return there, here


def test_messages_of_a_rank_that_knows_the_secret_go_both_ways(both_ends):
    there, here = both_ends
    status = Status("fit", stack=("train.py:41 in load",))
    channel.send_message(there, status)
    assert channel.receive_message(here) == status
    channel.send_message(here, channel.EndRun("it waits", 30.0))
    assert channel.receive_message(there) == channel.EndRun("it waits", 30.0)


def test_messages_that_a_busy_process_has_not_read_are_acknowledged(both_ends):
    there, _here = both_ends
    channel.send_message(there, channel.GotSigterm())
    deadline = time.monotonic() + 10
    while not channel.is_acknowledged(there):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("values", [{"type": "Fetch"}, {"type": "StepHeld"}, {"step": 3}])
def test_objects_that_are_no_message_of_a_watcher_are_an_error(both_ends, values):
    there, here = both_ends
    channel.send(there, values)
    with pytest.raises(ValueError, match="no message of a watcher"):
        channel.receive_message(here)


def test_strangers_are_hung_up_on_and_hold_up_no_rank(listener, admitted):
    assert channel.connect(listener.endpoint._replace(secret="a guess"), 1) is None
    silent = [socket.create_connection(("127.0.0.1", listener.endpoint.port)) for _ in range(5)]
    noisy = socket.create_connection(("127.0.0.1", listener.endpoint.port))
    noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert channel.connect(listener.endpoint, 2) is not None
    assert admitted.get(timeout=20)[0] == 2
    assert admitted.empty()
    for stranger in [*silent, noisy]:
        stranger.close()


def test_a_rank_that_no_address_leads_to_rank_0_goes_without(listener):
    listener.close()
    assert channel.connect(listener.endpoint, 1) is None


def test_one_host_listens_to_itself_alone_and_several_name_their_addresses(listener):
    several = channel.RankListener(one_host=False)
    several.close()
    assert listener.endpoint.addresses == ("127.0.0.1",)
    assert several.endpoint.addresses
