"""The bytes that ``hvkit.traffic()`` reports are those that leave the hosts."""

import json
import sys

import pytest
from cases import cases

HVKIT = [sys.executable, "-m", "hvkit.cli", "run"]
# Takes steps with one strategy after the other, and prints for each what hvkit has counted in them,
# and what this host's interface has.
TRAIN = """
import gc, json, sys
from pathlib import Path
import torch, hvkit
from hvkit import *
from torch import nn


def by_interface():
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
    return int(fields[8])


def by_hvkit():
    return sum(sent.bytes for sent in hvkit.traffic().values())


def counted_in_steps(strategy, compression):
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hvkit.distribute(model, optimizer, strategy=eval(strategy), compression=eval(compression))
    x = torch.randn(4, 1024)
    for step in range(12):
        if step == 4:
            hvkit.barrier()
            before = by_hvkit(), by_interface()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    hvkit.barrier()
    return [b - a for a, b in zip(before, (by_hvkit(), by_interface()))]


counted = []
for case in json.loads(sys.argv[1]):
    counted.append(counted_in_steps(*case))
    gc.collect()
print(json.dumps(counted), flush=True)
"""
# What hvkit counts for an allreduce is what a ring sends. Open MPI's default between hosts (han)
# gathers at one of them, which then sends more.
RING = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "ring",
}


@pytest.mark.parametrize(
    "strategies",
    cases(
        [
            [("LocalSGD(4)", "'int8'")],
            [
                ("Synchronous()", "'none'"),
                ("Synchronous()", "TopK(0.05)"),
                ("ShardedOptimizer()", "'none'"),
                ("Gossip()", "'none'"),
                ("DiLoCo(4, overlap=2)", "'none'"),
                ("DeMo(top_k=256)", "'none'"),
                ("ParameterServer(3)", "'none'"),
                ("FullyShard()", "'none'"),
            ],
        ]
    ),
)
def test_bytes_are_those_of_the_interfaces(rig, strategies):
    everyone = sent_by_each(rig, strategies)
    for case, counted in zip(strategies, zip(*everyone, strict=True), strict=True):
        hvkit, interface = (sum(each) for each in zip(*counted, strict=True))
        assert hvkit == pytest.approx(interface, rel=0.03), case


def test_one_rank_that_averages_for_all_sends_to_all(rig):
    everyone = sent_by_each(rig, [("Centralized()", "'none'")])
    (hvkit, interface), *others = sorted((counted for (counted,) in everyone), reverse=True)
    weights = 4 * 8 * (2 * 1024 * 2048 + 2048 + 1024)  # in eight steps
    assert hvkit == pytest.approx(interface, rel=0.03)
    assert interface == pytest.approx(2 * weights, rel=0.03)
    for _, sent in others:
        assert sent == pytest.approx(weights, rel=0.03)


def sent_by_each(rig, strategies):
    """What hvkit and the interface have counted on each of three hosts, for each strategy."""
    hosts = rig(["node1", "node2", "node3"])
    words = ["-np", "3", "-H", "node1:1,node2:1,node3:1", sys.executable, "-c", TRAIN]
    done = hosts.host("node1").run(
        [*HVKIT, *words, json.dumps(strategies)],
        env=RING | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(counted) == 3
    return counted
