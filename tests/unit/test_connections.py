"""Connections are made between those who know the key, and nobody else."""

import contextlib
import queue
import socket
import threading
from multiprocessing.connection import Connection

import pytest

from hvkit import connections
from hvkit.connections import Listener, connect

KEY = b"k" * 32


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1", KEY)
    yield listener
    listener.close()


@pytest.fixture
def admitted(listener):
    """A queue of the connections that the listener admits."""
    found = queue.SimpleQueue()
    serving = threading.Thread(target=listener.serve, args=(found.put,))
    serving.start()
    yield found
    listener.close()
    serving.join(20)
    assert not serving.is_alive()


def stranger(listener):
    return socket.create_connection(("127.0.0.1", listener.port), timeout=20)


def test_who_knows_the_key_is_admitted_and_nothing_of_what_follows_is_lost(listener, admitted):
    there = connect(["127.0.0.1"], listener.port, KEY)
    there.sendall(b"at once")
    here = admitted.get(timeout=20)
    assert here.recv(7, socket.MSG_WAITALL) == b"at once"
    here.sendall(b"answer")
    assert there.recv(100) == b"answer"
    assert here.gettimeout() is there.gettimeout() is None


def test_who_has_another_key_is_not_admitted_and_learns_that(listener, admitted):
    with pytest.raises(OSError, match="did not prove that it knows the key"):
        connect(["127.0.0.1"], listener.port, b"a guess")
    connect(["127.0.0.1"], listener.port, KEY)
    admitted.get(timeout=20)
    assert admitted.empty()


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x7f\xff\xff\xff" + b"x" * 5000,
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x10" + b"x" * 16,
    ],
)
def test_a_stranger_who_sends_anything_else_is_hung_up_on_at_once(
    listener, admitted, message, monkeypatch
):
    monkeypatch.setattr(connections, "_PROVE", 100.0)
    with stranger(listener) as noisy:
        noisy.sendall(message)
        with contextlib.suppress(ConnectionResetError):
            while noisy.recv(4096):
                pass
    assert admitted.empty()


def test_silent_strangers_and_half_messages_delay_nobody(listener, admitted, monkeypatch):
    monkeypatch.setattr(connections, "_PROVE", 100.0)
    silent = [stranger(listener) for _ in range(20)]
    half = stranger(listener)
    half.sendall(b"\x00\x00")
    connect(["127.0.0.1"], listener.port, KEY)
    admitted.get(timeout=20)
    for each in [*silent, half]:
        each.close()


def send_slowly(connection):
    pause = threading.Event()
    while not pause.wait(0.02):
        connection.sendall(b"x")


def test_a_stranger_who_sends_byte_by_byte_is_hung_up_on(listener, admitted, monkeypatch):
    monkeypatch.setattr(connections, "_PROVE", 0.2)
    with stranger(listener) as slow:
        slow.sendall(b"\x00\x00\x00\xff")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_slowly(slow)
    assert admitted.empty()


def test_a_server_that_only_pretends_to_know_the_key_is_refused():
    """It accepts any answer to its own challenge, but cannot answer the other one."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            accepted, _ = server.accept()
            pretender = Connection(accepted.detach())
            pretender.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            pretender.recv_bytes()
            pretender.send_bytes(b"#WELCOME#")
            pretender.recv_bytes()
            pretender.send_bytes(b"y" * 16)
            with pretender:
                pretender.recv_bytes()

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(OSError, match="did not prove that it knows the key"):
            connect(["127.0.0.1"], server.getsockname()[1], KEY)


def test_a_service_of_another_kind_is_passed_over_for_the_next_address(listener, admitted):
    with socket.create_server(("127.0.0.2", listener.port)) as other:

        def greet():
            accepted, _ = other.accept()
            with accepted, contextlib.suppress(ConnectionResetError):
                accepted.sendall(b"SSH-2.0-OpenSSH_9.6 and so on")
                accepted.recv(100)

        threading.Thread(target=greet, daemon=True).start()
        connect(["127.0.0.2", "127.0.0.1"], listener.port, KEY)
    admitted.get(timeout=20)


def test_a_silent_service_is_given_up(monkeypatch):
    monkeypatch.setattr(connections, "_PROVE", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(OSError, match="timed out"),
    ):
        connect(["127.0.0.1"], silent.getsockname()[1], KEY)


def test_every_address_that_fails_is_named_with_its_reason(listener):
    listener.close()
    with pytest.raises(OSError, match=r"refused; .*refused"):
        connect(["127.0.0.1", "127.0.0.2"], listener.port, KEY)


def test_a_listener_on_all_addresses_has_one_port_for_ipv4_and_ipv6():
    listener = Listener(None, KEY)
    threading.Thread(target=listener.serve, args=(socket.socket.close,), daemon=True).start()
    try:
        connect(["127.0.0.1"], listener.port, KEY).close()
        if socket.has_dualstack_ipv6():
            connect(["::1"], listener.port, KEY).close()
    finally:
        listener.close()
