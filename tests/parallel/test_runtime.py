"""Ranks and the collectives on objects."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from ranks import error_of

import hvkit
from hvkit import runtime


def test_ranks_are_what_the_launcher_says():
    assert hvkit.rank() == int(os.environ["OMPI_COMM_WORLD_RANK"])
    assert hvkit.size() == int(os.environ["OMPI_COMM_WORLD_SIZE"])
    assert hvkit.local_size() == int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    assert sorted(hvkit.allgather(hvkit.local_rank())) == list(range(hvkit.local_size()))


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_brings_any_object_from_any_root(root):
    sent = {"rank": hvkit.rank(), "array": np.arange(5) * hvkit.rank(), "text": "ä" * hvkit.rank()}
    received = hvkit.broadcast(sent, root)
    assert received["rank"] == root
    assert received["array"].tolist() == [0, root, 2 * root, 3 * root, 4 * root]
    assert received["text"] == "ä" * root


def test_a_broadcast_longer_than_one_message_goes_out_in_pieces(monkeypatch):
    monkeypatch.setattr(runtime, "_CHUNK", 1000)
    everything = hvkit.broadcast(list(range(5000)) if hvkit.rank() == 0 else None)
    assert everything == list(range(5000))


def test_allgather_keeps_the_order_and_takes_objects_of_any_length():
    assert hvkit.allgather(None) == [None] * hvkit.size()
    assert hvkit.allgather("x" * 1000 * hvkit.rank()) == [
        "x" * 1000 * rank for rank in range(hvkit.size())
    ]


def test_a_root_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=rf"from 0 to {hvkit.size() - 1}, got {hvkit.size()}"):
        hvkit.broadcast(1, root=hvkit.size())


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


def test_both_frameworks_engines_run_in_one_process():
    torch, tensorflow = runtime.engine("torch"), runtime.engine("tensorflow")
    mine = np.full(3, hvkit.rank(), np.uint8)
    for engine in (torch, tensorflow):
        assert engine.allgather(mine).tolist() == [r for r in range(hvkit.size()) for _ in range(3)]
        assert engine.broadcast(mine, 1).tolist() == [1, 1, 1]


def test_an_unknown_framework_is_an_error():
    with pytest.raises(ValueError, match="'jax'"):
        hvkit.init("jax")
