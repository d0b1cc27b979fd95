"""Ranks and the collectives on objects."""

import os
import re
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ranks import error_of

import hvkit
from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.transport import engines, mailbox
from hvkit.transport.mailbox import MpiMailbox


def test_ranks_are_what_the_launcher_says():
    assert hvkit.rank() == int(os.environ["OMPI_COMM_WORLD_RANK"])
    assert hvkit.size() == int(os.environ["OMPI_COMM_WORLD_SIZE"])
    assert hvkit.local_size() == int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    assert sorted(hvkit.allgather(hvkit.local_rank())) == list(range(hvkit.local_size()))


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_rank_that_waits_leaves_its_core_to_others(framework):
    mine = np.zeros(4, np.float32)
    runtime.engine(framework).allreduce(mine, "sum")
    before = time.process_time()
    if hvkit.rank() == 1:
        time.sleep(1.5)
    runtime.engine(framework).allreduce(mine, "sum")
    # One thread that polls takes 1.5 s, or as much as a busy machine gives it.
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 16, 17, 50])
def test_bytes_travel_in_pieces_to_every_rank(monkeypatch, root, length):
    monkeypatch.setattr(engines, "PIECE", 16)
    data = np.arange(length, dtype=np.uint8)
    mine = data if hvkit.rank() == root else np.empty(0, np.uint8)
    received = collectives.broadcast_bytes(mine, root)
    assert received.tolist() == data.tolist()
    assert (received is data) == (hvkit.rank() == root)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_brings_any_object_from_any_root(root):
    sent = {"rank": hvkit.rank(), "array": np.arange(5) * hvkit.rank(), "text": "ä" * hvkit.rank()}
    received = hvkit.broadcast(sent, root)
    assert received["rank"] == root
    assert received["array"].tolist() == [0, root, 2 * root, 3 * root, 4 * root]
    assert received["text"] == "ä" * root


def test_allgather_keeps_the_order_and_takes_objects_of_any_length():
    assert hvkit.allgather(None) == [None] * hvkit.size()
    assert hvkit.allgather("x" * 1000 * hvkit.rank()) == [
        "x" * 1000 * rank for rank in range(hvkit.size())
    ]


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("collective", ["allgather", "broadcast"])
def test_objects_that_do_not_pickle_are_an_error_on_every_rank(source, collective):
    sent = (lambda: 1) if hvkit.rank() == source else 1
    arguments = [source] if collective == "broadcast" else []
    error, text = error_of(lambda: getattr(hvkit, collective)(sent, *arguments))
    assert error is TypeError
    assert f"the object that rank {source} passes does not pickle" in text
    assert hvkit.allgather(1) == [1] * hvkit.size()


def test_collectives_work_in_inference_mode():
    with torch.inference_mode():
        assert hvkit.average(hvkit.rank()) == (hvkit.size() - 1) / 2
        assert hvkit.broadcast(hvkit.rank(), 1) == 1
        assert hvkit.allreduce(torch.ones(2), op="sum").tolist() == [hvkit.size()] * 2


def test_a_fork_of_a_rank_is_no_rank():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        error, text = error_of(lambda: hvkit.average(1.0))
        os.write(write, f"{error.__name__}: {text}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode()
    assert said.startswith(f"LaunchError: this process was started by rank {hvkit.rank()}")


@pytest.fixture(params=["torch", "tensorflow"])
def sent(request, monkeypatch):
    """Messages of 1000 bytes at most, through either engine; what went through it, in bytes."""
    engine, lengths = runtime.engine(request.param), []
    for limit in "CHUNK", "PIECE":
        monkeypatch.setattr(engines, limit, 1000)
    monkeypatch.setattr(runtime, "any_engine", lambda: engine)

    def recorded(collective):
        def call(*arguments):
            result = collective(*arguments)
            lengths.append(result.size)
            return result

        return call

    for name in ("allgather", "broadcast"):
        monkeypatch.setattr(engine, name, recorded(getattr(engine, name)))
    return lengths


@pytest.mark.parametrize("length", [0, 10, 300, 485, 1000, 5000])
@pytest.mark.parametrize("everywhere", [True, False])
def test_an_allgather_longer_than_one_message_goes_out_in_pieces(sent, length, everywhere):
    def of(rank):
        return bytes([rank]) * (length if everywhere or rank == 1 else 3)

    assert hvkit.allgather(of(hvkit.rank())) == [of(rank) for rank in range(hvkit.size())]
    assert max(sent) <= 1000
    assert len(sent) >= length * (hvkit.size() if everywhere else 1) // 1000
    if length <= 10:
        assert len(sent) == 1, "what is short takes one message"


def test_no_message_reaches_the_2_gib_that_mpi_counts():
    assert engines.CHUNK < 2**31


def pieces_sent(monkeypatch):
    """What large objects send from now on, with the target; not what a parameter server does."""
    pieces, send = [], MpiMailbox.send

    def counted(box, piece, to, *others, **options):
        made = collectives._mailbox_of_objects
        if made.cache_info().currsize and box is made():
            pieces.append((piece, to))
        return send(box, piece, to, *others, **options)

    monkeypatch.setattr(MpiMailbox, "send", counted)
    return pieces


@pytest.mark.parametrize("by_mpi", ["all", "none", "not rank 1"])
@pytest.mark.parametrize("length", [0, 10, 1000, 5000])
def test_collect_brings_the_objects_to_rank_0_only_and_in_pieces(sent, monkeypatch, by_mpi, length):
    if by_mpi == "none" or (by_mpi == "not rank 1" and hvkit.rank() == 1):
        monkeypatch.setattr(mailbox, "can_send", lambda engine: False)
    sends = pieces_sent(monkeypatch)
    mine = {"rank": hvkit.rank(), "much": np.full(length * hvkit.rank(), hvkit.rank(), np.uint8)}
    everyone = list(collectives.collect("test", mine))
    if hvkit.rank() == 0:
        assert [each["rank"] for each in everyone] == list(range(hvkit.size()))
        for rank, each in enumerate(everyone):
            assert each["much"].tolist() == [rank] * length * rank
    else:
        assert everyone == []
    assert max(sent) <= 1000
    pieces = [piece.size for piece, _ in sends]
    assert (sum(pieces) > length * hvkit.rank()) == (by_mpi == "all" and hvkit.rank() > 0)
    assert max(pieces, default=0) <= 1000


def test_rank_0_holds_one_collected_object_at_a_time():
    held = []
    for each in collectives.collect("test", np.zeros(10)):
        assert all(reference() is None for reference in held[1:-1])  # its own it keeps
        held.append(weakref.ref(each))
    assert len(held) == (hvkit.size() if hvkit.rank() == 0 else 0)


@pytest.mark.parametrize("by_mpi", [True, False])
@pytest.mark.parametrize("length", [0, 10, 5000])
def test_scatter_gives_each_rank_its_own_object_in_pieces(sent, monkeypatch, by_mpi, length):
    monkeypatch.setattr(mailbox, "can_send", lambda engine: by_mpi)
    pieces = pieces_sent(monkeypatch)
    own = collectives.scatter("test", lambda rank: np.full(length * rank, rank, np.uint8))
    assert own.tolist() == [hvkit.rank()] * length * hvkit.rank()
    assert max(sent) <= 1000
    targets = range(1, hvkit.size()) if by_mpi and hvkit.rank() == 0 else ()
    assert {to for _, to in pieces} == set(targets)
    assert max((piece.size for piece, _ in pieces), default=0) <= 1000


def test_an_object_that_rank_0_cannot_make_is_an_error_on_all():
    def make(rank):
        if rank == 1:
            raise ValueError("no such file")
        return "x" * 5000

    with pytest.raises(ValueError, match=r"no such file$"):
        collectives.scatter("test", make)
    hvkit.barrier()


def test_an_object_that_a_rank_cannot_read_is_an_error_on_all():
    with pytest.raises(hvkit.HvkitError, match=r"of rank 0.*ValueError|ValueError.*of rank 0"):
        collectives.scatter("test", lambda rank: Poison())
    assert collectives.scatter("test", lambda rank: rank) == hvkit.rank()


@sendable
@dataclass
class Poison:
    """Raises when it is read."""

    sent: bool = False

    def __post_init__(self):
        if self.sent:
            raise ValueError("poison")
        self.sent = True


@pytest.mark.parametrize("by_mpi", [True, False])
def test_an_object_that_rank_0_cannot_read_is_an_error_on_all_and_blocks_nothing(
    sent, monkeypatch, by_mpi
):
    monkeypatch.setattr(mailbox, "can_send", lambda engine: by_mpi)
    mine = [Poison() if hvkit.rank() == 1 else "fine", "x" * 5000]
    error, text = error_of(lambda: list(collectives.collect("test", mine)))
    assert error is hvkit.HvkitError
    assert "rank 0 cannot collect the objects of all ranks: ValueError" in text
    assert "bytes of rank 1" in text
    everyone = list(collectives.collect("test", hvkit.rank()))
    assert everyone == (list(range(hvkit.size())) if hvkit.rank() == 0 else [])


def test_collect_notices_a_rank_that_calls_something_else():
    call = (lambda: list(collectives.collect("save", 1))) if hvkit.rank() == 0 else hvkit.barrier
    error, text = error_of(call)
    assert error is hvkit.RanksDisagreeError
    assert re.search(r"rank 1 calls hvkit.barrier \(.*\) while rank 0 calls save \(", text), text


def test_barrier_holds_everyone_back_until_the_last_has_come(tmp_path):
    folder = hvkit.broadcast(str(tmp_path))
    with open(os.path.join(folder, str(hvkit.rank())), "w"):
        pass
    hvkit.barrier()
    assert sorted(os.listdir(folder)) == [str(rank) for rank in range(hvkit.size())]


def test_ranks_in_different_calls_are_told_which():
    call = (lambda: hvkit.barrier()) if hvkit.rank() == 0 else (lambda: hvkit.average(1.0))
    error, text = error_of(call)
    assert error is hvkit.RanksDisagreeError
    line = r"\(tests/parallel/test_runtime.py:\d+\)"
    pattern = rf"rank 1 calls hvkit.average {line} while rank 0 calls hvkit.barrier {line}"
    assert re.search(pattern, text), text


def test_a_process_that_a_rank_starts_knows_its_rank_and_does_not_join():
    code = "import hvkit; hvkit.init(); print(hvkit.rank(), hvkit.size()); hvkit.barrier()"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.stdout == f"{hvkit.rank()} {hvkit.size()}\n"
    assert f"LaunchError: this process was started by rank {hvkit.rank()}" in child.stderr


def test_an_unknown_framework_or_root_is_an_error():
    with pytest.raises(ValueError, match=rf"from 0 to {hvkit.size() - 1}, got {hvkit.size()}"):
        hvkit.broadcast(1, root=hvkit.size())
    with pytest.raises(ValueError, match="'mxnet'"):
        hvkit.init("mxnet")
