"""The bytes that ``hvkit.traffic()`` reports are those that leave the hosts."""

import json
import sys

import pytest
from cases import MORE, cases
from quick_start import LEFT_OUT

HVKIT = [sys.executable, "-m", "hvkit", "run"]
BY_INTERFACE = """
from pathlib import Path


def by_interface():
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
    return int(fields[8])


"""
# Takes steps with one strategy after the other, and prints for each what hvkit has counted in them,
# and what this host's interface has.
COUNT = """
import gc, json, sys
import numpy as np, hvkit
from hvkit import *


def by_hvkit():
    return sum(sent.bytes for sent in hvkit.traffic().values())


def counted_in_steps(**options):
    x = np.random.default_rng(hvkit.rank()).normal(size=(4, 1024)).astype(np.float32)
    step = steps_of(x, **options)
    # Two rounds of four steps, also if each is exchanged in the two steps after it.
    for number in range(11):
        if number == 3:
            hvkit.barrier()
            before = by_hvkit(), by_interface()
        step()
    hvkit.barrier()
    return [b - a for a, b in zip(before, (by_hvkit(), by_interface()))]


counted = []
hvkit.init()
for strategy, compression in json.loads(sys.argv[1]):
    counted.append(counted_in_steps(strategy=eval(strategy), compression=eval(compression)))
    gc.collect()
print(json.dumps(counted), flush=True)
"""
SCRIPTS = {
    "torch": """
import torch
from torch import nn


def steps_of(x, **options):
    x = torch.from_numpy(x)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hvkit.distribute(model, optimizer, **options)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
""",
    "keras": """
import keras, tensorflow as tf


def steps_of(x, **options):
    dense = keras.layers.Dense(2048), keras.layers.Dense(1024)
    model = keras.Sequential([keras.Input((1024,)), *dense])
    optimizer = keras.optimizers.SGD(0.01)
    hvkit.distribute(model, optimizer, **options)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    return step
""",
}
FIRST = "torch", [("LocalSGD(4)", "'int8'")]
# One of each kind of message: sums, rows, what owners send, neighbours', and a server's.
IN_BOTH = [
    ("Synchronous()", "'bf16'"),
    ("Synchronous()", "TopK(0.05)"),
    ("ShardedOptimizer()", "'none'"),
    ("Gossip()", "'none'"),
    ("DiLoCo(4, overlap=2)", "'none'"),
    ("ParameterServer(3)", "'none'"),
]
IN_TORCH = [
    *IN_BOTH,
    ("Synchronous()", "'none'"),
    ("Synchronous()", "PowerSGD(32)"),
    ("ElasticAveraging(4)", "'none'"),
    ("DeMo(top_k=256)", "'none'"),
    ("FullyShard()", "'none'"),
]


@pytest.mark.parametrize(
    ("framework", "strategies"),
    cases([FIRST, ("torch", IN_TORCH), ("keras", IN_BOTH)]),
)
def test_bytes_are_those_of_the_interfaces(rig, framework, strategies):
    everyone = sent_by_each(rig, strategies, framework)
    for case, counted in zip(strategies, zip(*everyone, strict=True), strict=True):
        hvkit, interface = (sum(each) for each in zip(*counted, strict=True))
        assert hvkit == pytest.approx(interface, rel=0.03), case


@MORE
def test_one_rank_that_averages_for_all_sends_to_all(rig):
    everyone = sent_by_each(rig, [("Centralized()", "'none'")])
    (hvkit, interface), *others = sorted((counted for (counted,) in everyone), reverse=True)
    weights = 4 * 8 * (2 * 1024 * 2048 + 2048 + 1024)  # in eight steps
    assert hvkit == pytest.approx(interface, rel=0.03)
    assert interface == pytest.approx(2 * weights, rel=0.03)
    for _, sent in others:
        assert sent == pytest.approx(weights, rel=0.03)


def sent_by_each(rig, strategies, framework="torch"):
    """What hvkit and the interface have counted on each of three hosts, for each strategy."""
    hosts = rig(["node1", "node2", "node3"])
    script = SCRIPTS[framework] + BY_INTERFACE + COUNT
    words = ["-np", "3", "-H", "node1:1,node2:1,node3:1", sys.executable, "-c", script]
    done = hosts.host("node1").run(
        [*HVKIT, *words, json.dumps(strategies)],
        env={"OMP_NUM_THREADS": "1", **LEFT_OUT},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(counted) == 3
    return counted


# Sums up numbers of a large tensor that are other ones on each rank and at each place; prints
# whether the sum is right, and what this host's interface has sent meanwhile for each of its bytes.
SUM = """
import json, torch, hvkit

numbers = torch.arange(2_000_003) % 1000
expected = sum((numbers + rank).float() for rank in range(hvkit.size()))
hvkit.allreduce(numbers.float(), "sum")
hvkit.barrier()
before = by_interface()
right = torch.equal(hvkit.allreduce((numbers + hvkit.rank()).float(), "sum"), expected)
hvkit.barrier()
result = right, (by_interface() - before) / expected.nbytes
if hvkit.local_rank() == 0:
    print("\\n" + json.dumps(result), flush=True)
"""


def printed_by_ranks(rig, slots, script):
    """The lists in JSON that ranks of a script print, with so many ranks on each host."""
    nodes = [f"node{number}" for number in range(1, len(slots) + 1)]
    placed = ",".join(f"{node}:{ranks}" for node, ranks in zip(nodes, slots, strict=True))
    done = rig(nodes).host("node1").run(
        [*HVKIT, "-np", str(sum(slots)), "-H", placed, sys.executable, "-c", script],
        env={"OMP_NUM_THREADS": "1", **LEFT_OUT},
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([1, 1, 1], 4 / 3),
        pytest.param([2, 2, 2], 4 / 3, marks=MORE),
        # Uneven hosts: one rank of each of two, one ring of all ranks on more.
        pytest.param([3, 1], 1, marks=MORE),
        pytest.param([2, 1, 1, 1], 8 / 5, marks=MORE),
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_large_sum_is_right_and_sends_little_wherever_ranks_are(rig, slots, expected):
    results = printed_by_ranks(rig, slots, BY_INTERFACE + SUM)
    assert len(results) == len(slots)
    for right, sent in results:
        assert right
        assert sent == pytest.approx(expected, rel=0.03)


# Gathers and exchanges rows, as many as each rank likes, and none from some; prints whether each
# result is right.
ROWS = """
import json, torch, hvkit
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.communication.exchanges import Messages

hvkit.init("torch")
wire, rank, size = Wire("weights"), hvkit.rank(), hvkit.size()


def rows(sender, receiver, count):
    return torch.arange(3 * count).reshape(-1, 3) + 7 * sender + 31 * receiver


def right(counts):  # by rank, how many rows it sends to each
    sent = torch.cat([rows(rank, to, count) for to, count in enumerate(counts[rank])])
    messages = Messages(sent, counts[rank], [each[rank] for each in counts])
    got = wire.start(messages, "exchange")()
    expected = [rows(sender, rank, each[rank]) for sender, each in enumerate(counts)]
    gathered = wire.gather(sent, "gather")
    all_rows = [
        rows(sender, to, n) for sender, each in enumerate(counts) for to, n in enumerate(each)
    ]
    return torch.equal(got, torch.cat(expected)) and torch.equal(gathered, torch.cat(all_rows))


ranks = range(size)
mixed = [[20_011 * ((3 * a + b) % 4) for b in ranks] for a in ranks]
from_one = [[70_001 * (a == 0 and b != 0) for b in ranks] for a in ranks]
few = [[1 for b in ranks] for a in ranks]
print("\\n" + json.dumps([right(counts) for counts in (mixed, from_one, few)]), flush=True)
"""
DIFFERS = """
import os

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["HVKIT_OWN_COLLECTIVES"] = "0"
"""


# Where ranks differ, all use Horovod's collectives, wherever they are.
@pytest.mark.parametrize(
    ("slots", "prelude"),
    cases(
        [([2, 1], ""), ([1, 1, 1], DIFFERS), ([2, 2], "")],
        name=lambda case: "+".join(map(str, case[0])) + (", differ" if case[1] else ""),
    ),
)
def test_rows_arrive_however_many_each_rank_sends(rig, slots, prelude):
    results = printed_by_ranks(rig, slots, prelude + ROWS)
    assert results == [[True] * 3] * sum(slots)
