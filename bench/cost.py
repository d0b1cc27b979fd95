"""What averaging costs as work grows: tensors, bytes, ranks, links, and hvkit's own Python.

    pip install -e '.[bench]'
    python bench/cost.py steps     # steps of 10 to 1,000 tensors and 1 to 400 MB; half an hour
    python bench/cost.py host      # without communication; a minute
    python bench/cost.py links     # as root, hosts made on this machine; ten minutes
    python bench/cost.py report    # prints tables, draws docs/pictures/cost.svg

The first three add records to bench/cost.jsonl. Nothing else may run meanwhile. ``report`` fits
lines to what was measured, and from the links' latency and bandwidth it computes what rings of 64
to 4,096 ranks would take.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from speed import (
    ENVIRONMENT,
    ON_RANKS,
    TORCH,
    add,
    by_kind,
    command,
    environment,
    peer_in_turns,
    shown,
    turns_of,
)

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench/cost.jsonl"
PICTURE = ROOT / "docs/pictures/cost.svg"
ON_LINKS = str(ROOT / "bench/cost_on_links.py")
HOST_TIME = str(ROOT / "bench/host_time.py")
ROUNDS = 2
TENSORS, MEGABYTES = (10, 100, 300, 1000), (1, 10, 100, 400)
PEERS = ("alone, memory kept", "hvkit", "DDP")
# A model of 25 million float32 weights, and what its step computes, for the simulation.
BYTES, COMPUTES = 100e6, 0.25
SIMULATED = (64, 256, 1024, 4096)
# Bytes a second of a host's link, and seconds for a message.
NETWORKS = {"25 Gbit/s, 10 us": (25e9 / 8, 10e-6), "100 Gbit/s, 5 us": (100e9 / 8, 5e-6)}


def steps(_):
    """What steps of models that compute nearly nothing take."""
    cases = [f"tensors-{n}" for n in TENSORS] + [f"megabytes-{n}" for n in MEGABYTES]
    for number in range(ROUNDS):
        for case in cases:
            with ExitStack() as stack:
                peers = {}
                for name in PEERS:
                    kind, launcher = TORCH[name]
                    peer = peer_in_turns(launcher, 2, [ON_RANKS["torch"], kind, case])
                    peers[name] = stack.enter_context(peer)
                for name, seconds in turns_of(peers, 1 if case == "megabytes-400" else 5).items():
                    add(RECORDS, kind="steps", case=case, peer=name, round=number, ms=1e3 * seconds)


def host(_):
    """What hvkit and DDP add to a step whose communication is left out."""
    for number in range(ROUNDS):
        for peer, launcher in ("hvkit", "mpirun"), ("ddp", "torchrun"):
            line = command(launcher, "2", [HOST_TIME, peer])
            done = subprocess.run(line, env=environment(), capture_output=True, text=True)
            add_printed(done, kind="host", peer=peer, round=number)


def links(_):
    """Bytes on the wire and seconds of means between hosts, and of steps over a slow link."""
    sys.path.insert(0, str(ROOT / "tests/cluster"))
    from rig import Rig

    def run(what, size, **limits):
        nodes = [f"node{number}" for number in range(1, size + 1)]
        hosts = ",".join(f"{node}:1" for node in nodes)
        launch = [sys.executable, "-m", "hvkit", "run", "-np", str(size), "-H", hosts]
        with Rig(nodes, **limits) as rig:
            script = [sys.executable, ON_LINKS, what]
            settings = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
            done = rig.host("node1").run([*launch, *script], env=settings, timeout=600)
        add_printed(done, kind=what, ranks=size)

    for size in (2, 3, 4):
        run("means", size)
    for _ in range(ROUNDS):
        run("compression", 2, bandwidth="100mbit")
        run("compiled", 2, bandwidth="1gbit")


def add_printed(done, **more):
    """Add what rank 0 has printed: lines of JSON."""
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            add(RECORDS, **more, **json.loads(line))


def report(_):
    kinds = by_kind(RECORDS)
    added = added_by_case(kinds["steps"])
    fits = {}
    for peer in PEERS[1:]:
        for unit in ("tensors", "megabytes"):
            points = sorted(
                (n, ms) for (name, u, n), ms in added.items() if (name, u) == (peer, unit)
            )
            # Relative errors count, as the values span two orders of magnitude.
            at, ms = np.array(points).T
            slope, fixed = np.polyfit(at, ms, 1, w=1 / np.maximum(ms, 0.3))
            fits[peer, unit] = points, slope, fixed
            each = ", ".join(f"{n}: {ms:.1f}" for n, ms in points)
            print(f"{peer}: {fixed:.2f} ms + {slope:.4f} ms for each of {unit} ({each})")
    for (peer, tensors), found in grouped(kinds["host"], "peer", "tensors").items():
        values = [each["ms"] for each in found]
        print(f"host time, {peer}, {tensors} tensors: {shown(values)} ms")
    for (ranks, size), found in grouped(kinds["means"], "ranks", "bytes").items():
        sent = max(each["sent"] for each in found) / (2 * (ranks - 1) / ranks * size)
        print(f"{ranks} hosts, {size} bytes: {sent:.3f} of a ring's bytes, {found[0]['ms']:.2f} ms")
    plain = [each["ms"] for each in kinds["compression"] if each["compression"] == "none"]
    for (name,), found in grouped(kinds["compression"], "compression").items():
        faster = [a / each["ms"] for a, each in zip(plain, found, strict=True)]
        print(
            f"100 Mbit/s, {name}: {found[0]['ms']:.0f} ms a step, {shown(faster)} of none's speed"
        )
    for (name,), found in grouped(kinds["compiled"], "compiled").items():
        print(f"1 Gbit/s, compiled: {name}: {shown([each['ms'] for each in found])} ms a step")
    latency, bandwidth = ring_of(kinds["means"])
    print(f"here: {1e6 * latency:.0f} us a message, {bandwidth / 1e9:.2f} GB/s")
    draw(fits, {"this machine's namespaces": (bandwidth, latency), **NETWORKS})


def added_by_case(records):
    """What each peer adds to a step, in milliseconds; the median over rounds.

    Added to a step that keeps its memory, as one with hvkit does.
    """
    cases = defaultdict(dict)
    for each in records:
        cases[each["case"], each["round"]][each["peer"]] = each["ms"]
    values = defaultdict(list)
    for (case, _), peers in cases.items():
        unit, number = case.split("-")
        for peer in PEERS[1:]:
            values[peer, unit, int(number)].append(peers[peer] - peers[PEERS[0]])
    return {key: statistics.median(some) for key, some in values.items()}


def grouped(records, *names):
    found = defaultdict(list)
    for each in records:
        found[tuple(each[name] for name in names)].append(each)
    return found


def ring_of(records):
    """Latency and bandwidth with which a ring takes what was measured: least squares.

    A ring of N ranks passes 2 (N - 1) messages of 1 / N of the bytes, one after the other.
    """
    messages = np.array([2 * (each["ranks"] - 1) for each in records])
    sizes = np.array([each["bytes"] / each["ranks"] for each in records])
    seconds = np.array([each["ms"] / 1e3 for each in records])
    terms = np.stack([messages, messages * sizes], 1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(seconds), rcond=None)
    return max(latency, 0.0), 1 / per_byte


def efficiency(ranks, bandwidth, latency):
    """Part of a step that computes, if two thirds of it can hide what is sent meanwhile."""
    sent = 2 * (ranks - 1) * (latency + BYTES / ranks / bandwidth)
    return COMPUTES / (COMPUTES + max(sent - 2 / 3 * COMPUTES, sent / 8))


def draw(fits, networks):
    import matplotlib.pyplot as plt

    # Text stays text, and the same records give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cost"})
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for axis, unit in zip(axes, ("tensors", "megabytes"), strict=False):
        for peer in PEERS[1:]:
            points, slope, fixed = fits[peer, unit]
            at, ms = np.array(points).T
            (line,) = axis.plot(at, ms, "o", label=peer)
            along = np.geomspace(at[0], at[-1])
            axis.plot(along, fixed + slope * along, color=line.get_color(), linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel=unit, ylabel="ms added to a step")
        axis.legend(fontsize="small")
    for name, network in networks.items():
        values = [efficiency(ranks, *network) for ranks in SIMULATED]
        axes[2].plot(SIMULATED, values, "o-", label=name)
        print(
            f"simulated, {name}: "
            + ", ".join(f"{n}: {e:.2f}" for n, e in zip(SIMULATED, values, strict=True))
        )
    axes[2].set(xscale="log", ylim=(0, 1.05), xlabel="ranks", ylabel="efficiency, simulated")
    axes[2].set_xticks(SIMULATED, SIMULATED)
    axes[2].minorticks_off()
    axes[2].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {each.__name__: each for each in (steps, host, links, report)}
    parser.add_argument("command", choices=commands)
    flags = parser.parse_args()
    commands[flags.command](flags)


if __name__ == "__main__":
    main()
