"""hvkit's speed beside its peers': training, collectives alone, and the start of a run.

    pip install -e '.[bench]'
    python bench/speed.py train          # PyTorch and Keras, idle and beside others; hours
    python bench/speed.py collectives    # averages of 4 KiB to 100 MiB; minutes
    python bench/speed.py start          # from Enter to the end of the first step; minutes
    python bench/speed.py report         # prints tables, draws docs/pictures/speed.svg

The first three add records to bench/speed.jsonl. Nothing else may run meanwhile. In a round each
peer runs once, in processes of its own under its own launcher. A peer's time in a round is the best
decile of its blocks of steps, on its slowest rank. Tables show medians over rounds of what peers
take beside what hvkit takes in the same round, with the lowest and the highest. ``--only`` chooses
workloads, ``--ranks`` and ``--rounds`` their numbers.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench/speed.jsonl"
PICTURE = ROOT / "docs/pictures/speed.svg"
ON_RANKS = {
    "torch": str(ROOT / "bench/speed_on_ranks.py"),
    "keras": str(ROOT / "bench/speed_keras_on_ranks.py"),
    "collectives": str(ROOT / "bench/speed_of_collectives.py"),
}
# Blocks and steps in each, of a few seconds together.
WORKLOADS = {
    "mnist": (12, 2),
    "resnet20": (8, 1),
    "large": (8, 1),
    "small": (30, 5),
    "transformer": (12, 3),
}
WAYS = {"fit": (12, 4), "loop": (12, 4)}
# In Keras 3 it trains custom loops only.
MIRRORED = "MultiWorkerMirroredStrategy"
# By name: what the ranks run, and the launcher that starts them.
TORCH = {
    "alone": ("alone", "mpirun"),
    "hvkit": ("hvkit", "hvkit"),
    "hvkit, mpirun": ("hvkit", "mpirun"),
    "DDP": ("ddp", "torchrun"),
    "Horovod": ("horovod", "horovodrun"),
    "Accelerate": ("accelerate", "torchrun"),
    "Fabric": ("fabric", "fabric"),
}
KERAS = {
    "alone": ("alone", "mpirun"),
    "hvkit": ("hvkit", "hvkit"),
    MIRRORED: ("mwms", "processes"),
}
BESIDE_BUSY = ("alone", "hvkit", "hvkit, mpirun", "DDP", "Horovod")
COLLECTIVES = {"hvkit": "mpirun", "mpi4py": "mpirun", "gloo": "torchrun"}
STARTS = {
    "torch": {
        "hvkit run": ("hvkit", "hvkit"),
        "mpirun": ("hvkit", "mpirun"),
        "horovodrun": ("horovod", "horovodrun"),
        "torchrun": ("ddp", "torchrun"),
    },
    "keras": {
        "hvkit run": ("hvkit", "hvkit"),
        "mpirun": ("hvkit", "mpirun"),
        "horovodrun": ("horovod", "horovodrun"),
    },
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def command(launcher, ranks, script):
    """The command line that starts ranks of a script with its arguments."""
    return {
        "mpirun": ["mpirun", "-np", ranks, "--oversubscribe", "--bind-to", "none", sys.executable],
        "hvkit": ["hvkit", "run", "-np", ranks, sys.executable],
        "horovodrun": ["horovodrun", "-np", ranks, sys.executable],
        "torchrun": ["torchrun", "--nproc-per-node", ranks],
        "fabric": ["fabric", "run", "--accelerator=cpu", f"--devices={ranks}", "--strategy=ddp"],
    }[launcher] + script


@contextmanager
def busy_processes(wanted):
    """One process a core that takes time from the ranks, as the workers of a data loader do."""
    line = f"import numpy as np; x = np.random.rand(1 << 18)\nwhile True: np.sort(x)  # {__file__}"
    cores = os.cpu_count() if wanted else 0
    busy = [subprocess.Popen([sys.executable, "-c", line]) for _ in range(cores)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def run(launcher, ranks, script):
    """The list that each rank prints."""
    environment = ENVIRONMENT | {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    if launcher == "processes":
        done = run_processes(ranks, script, environment)
    else:
        line = command(launcher, str(ranks), script)
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
    text = done.stdout.replace("<stdout>:", "\n")
    printed = []
    for line in text.splitlines():
        start = line.find("[")
        if start >= 0 and line.rstrip().endswith("]") and line[start + 1 : start + 2].isdigit():
            try:
                printed.append(json.loads(line[start:]))
            except ValueError:
                continue  # "[1,0]<stdout>" and such
    printed = [each for each in printed if all(isinstance(x, float) for x in each)]
    if done.returncode or len(printed) != ranks:
        sys.exit(f"{launcher} {script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return printed


def run_processes(ranks, script, environment):
    """TensorFlow's own way: every process finds the others in TF_CONFIG."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    started = []
    for index in range(ranks):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        own = environment | {"TF_CONFIG": json.dumps(task)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, *script], env=own, **pipes))
    ended = [each.communicate(timeout=600) for each in started]
    out, err = ("\n".join(texts) for texts in zip(*ended, strict=True))
    code = max(abs(each.returncode) for each in started)
    return subprocess.CompletedProcess(script, code, out, err)


def best_decile(values):
    return sorted(values)[len(values) // 10]


def add(**record):
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(record, flush=True)


def train(flags):
    cases = [("torch", TORCH, name, size) for name, size in WORKLOADS.items()]
    cases += [("keras", KERAS, name, size) for name, size in WAYS.items()]
    for number in range(flags.rounds):
        for framework, peers, workload, (blocks, steps) in cases:
            if flags.only and workload not in flags.only:
                continue
            for busy in (False, True):
                for peer, (kind, launcher) in peers.items():
                    if (busy and peer not in BESIDE_BUSY) or (peer, workload) == (MIRRORED, "fit"):
                        continue
                    script = [ON_RANKS[framework], kind, workload, str(blocks), str(steps)]
                    with busy_processes(busy):
                        printed = run(launcher, flags.ranks, script)
                    seconds = max(map(best_decile, printed))
                    add(kind="train", workload=workload, busy=busy, peer=peer, ranks=flags.ranks,
                        round=number, ms=round(1e3 * seconds, 3))  # fmt: skip


def collectives(flags):
    for number in range(flags.rounds):
        for peer, launcher in COLLECTIVES.items():
            (times, *_) = run(launcher, flags.ranks, [ON_RANKS["collectives"], peer])
            add(kind="collectives", peer=peer, ranks=flags.ranks, round=number,
                ms=[round(1e3 * t, 4) for t in times])  # fmt: skip


def start(flags):
    for number in range(flags.rounds):
        for framework, peers in STARTS.items():
            for peer, (kind, launcher) in peers.items():
                workload = "mnist" if framework == "torch" else "loop"
                begun = time.time()
                ends = run(launcher, flags.ranks, [ON_RANKS[framework], kind, workload, "0", "1"])
                seconds = max(end for (end,) in ends) - begun
                add(kind="start", framework=framework, peer=peer, ranks=flags.ranks, round=number,
                    seconds=round(seconds, 3), ended=round(time.time() - begun, 3))  # fmt: skip


def by_round(records, *names):
    """Records of each case, by peer and round; the last of each round counts."""
    cases = defaultdict(lambda: defaultdict(dict))
    for each in records:
        cases[tuple(each[name] for name in names)][each["peer"]][each["round"]] = each
    return cases


def ratios(peers, peer, other, field="ms"):
    """How often as fast a peer is as another, in each round that has both."""
    mine, theirs = peers[peer], peers[other]
    return [theirs[n][field] / mine[n][field] for n in sorted(mine.keys() & theirs.keys())]


def shown(values):
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(flags):
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    kinds = defaultdict(list)
    for each in records:
        kinds[each["kind"]].append(each)
    for (workload, busy, ranks), peers in by_round(
        kinds["train"], "workload", "busy", "ranks"
    ).items():
        print(f"\n{workload}, {ranks} ranks, {'beside busy processes' if busy else 'idle'}")
        print("| peer | ms a step | hvkit's speed to its |\n|---|---|---|")
        for peer, rounds in peers.items():
            ms = statistics.median(each["ms"] for each in rounds.values())
            print(f"| {peer} | {ms:.1f} | {shown(ratios(peers, 'hvkit', peer))} |")
    for (ranks,), peers in by_round(kinds["collectives"], "ranks").items():
        print(f"\ncollectives, {ranks} ranks: ms for 4 KiB, 64 KiB, 1 MiB, 10 MiB, 100 MiB")
        for peer, rounds in peers.items():
            columns = zip(*(each["ms"] for each in rounds.values()), strict=True)
            print(
                f"| {peer} | " + " | ".join(f"{statistics.median(c):.3f}" for c in columns) + " |"
            )
    for (framework, ranks), peers in by_round(kinds["start"], "framework", "ranks").items():
        print(f"\nstart, {framework}, {ranks} ranks: seconds to the first step, to the end")
        for peer, rounds in peers.items():
            seconds, ended = (
                statistics.median(each[field] for each in rounds.values())
                for field in ("seconds", "ended")
            )
            print(f"| {peer} | {seconds:.1f} | {ended:.1f} |")
    draw(kinds["train"])


def draw(records):
    import matplotlib.pyplot as plt

    # Text stays text, and the same records give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speed"})
    cases = by_round(
        [r for r in records if r["workload"] in WORKLOADS], "workload", "busy", "ranks"
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, busy in zip(axes, (False, True), strict=True):
        workloads = [w for w in WORKLOADS if (w, busy, 2) in cases]
        peers = [p for p in TORCH if p != "alone" and (not busy or p in BESIDE_BUSY)]
        for n, peer in enumerate(peers):
            heights = []
            for workload in workloads:
                found = ratios(cases[workload, busy, 2], peer, "alone")
                heights.append(statistics.median(found) if found else 0)
            places = [at + 0.8 * n / len(peers) for at in range(len(workloads))]
            axis.bar(places, heights, 0.8 / len(peers), align="edge", label=peer)
        axis.set_xticks([at + 0.4 for at in range(len(workloads))], workloads)
        axis.set_title("beside one busy process a core" if busy else "idle machine")
        axis.axhline(1, color="grey", linewidth=0.8)
    axes[0].set_ylabel("speed, 1 = without communication")
    axes[0].legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {each.__name__: each for each in (train, collectives, start, report)}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="workloads")
    flags = parser.parse_args()
    commands[flags.command](flags)


if __name__ == "__main__":
    main()
