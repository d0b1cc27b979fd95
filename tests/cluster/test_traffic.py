"""The bytes that ``hvkit.traffic()`` reports are those that leave the hosts."""

import json
import sys

import pytest
from cases import MORE, cases

HVKIT = [sys.executable, "-m", "hvkit.cli", "run"]
# Takes steps with one strategy after the other, and prints for each what hvkit has counted in them,
# and what this host's interface has.
COUNT = """
import gc, json, sys
from pathlib import Path
import numpy as np, hvkit
from hvkit import *


def by_interface():
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
    return int(fields[8])


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
# What hvkit counts for an allreduce is what a ring sends. Open MPI's default between hosts (han)
# gathers at one of them, which then sends more.
RING = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "ring",
}


FIRST = "torch", [("LocalSGD(4)", "'int8'")]
IN_BOTH = [
    ("Synchronous()", "'none'"),
    ("Synchronous()", "'bf16'"),
    ("Synchronous()", "TopK(0.05)"),
    ("Synchronous()", "PowerSGD(32)"),
    ("ShardedOptimizer()", "'none'"),
    ("Gossip()", "'none'"),
    ("ElasticAveraging(4)", "'none'"),
    ("DiLoCo(4, overlap=2)", "'none'"),
    ("DeMo(top_k=256)", "'none'"),
    ("ParameterServer(3)", "'none'"),
]


@pytest.mark.parametrize(
    ("framework", "strategies"),
    cases([FIRST, ("torch", [*IN_BOTH, ("FullyShard()", "'none'")]), ("keras", IN_BOTH)]),
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
    script = SCRIPTS[framework] + COUNT
    words = ["-np", "3", "-H", "node1:1,node2:1,node3:1", sys.executable, "-c", script]
    done = hosts.host("node1").run(
        [*HVKIT, *words, json.dumps(strategies)],
        env=RING | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(counted) == 3
    return counted
