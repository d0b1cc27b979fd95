"""hvkit's speed beside its peers': training, collectives alone, and the start of a run.

    pip install -e '.[bench]'
    python bench/speed.py train          # PyTorch and Keras, idle and beside others; an hour
    python bench/speed.py collectives    # averages of 4 KiB to 100 MiB; minutes
    python bench/speed.py start          # from Enter to the end of the first step; minutes
    python bench/speed.py report         # prints tables
    python bench/speed.py picture        # draws docs/pictures/speed.svg

The first three add records to a file, bench/speed.jsonl by default. Nothing else may run meanwhile.
Each peer runs in processes of its own under its own launcher. In ``train``, peers take turns of a
few steps, and are stopped in between. A peer's time in a round is the best decile of its turns, on
the slowest rank. Tables show medians over rounds of what peers take beside what hvkit takes in the
same round, with the lowest and the highest. ``--only`` chooses workloads, ``--peers`` peers.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path

from turns import Peer

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/pictures/speed.svg"
PICTURE_OVER_RANKS = ROOT / "docs/pictures/speed_over_ranks.svg"
LIMIT = "alone, memory kept"
OVER_RANKS = ("mnist", "large")
BATCH = 64
ON_RANKS = {
    "torch": str(ROOT / "bench/speed_on_ranks.py"),
    "keras": str(ROOT / "bench/speed_keras_on_ranks.py"),
    "trainers": str(ROOT / "bench/speed_trainers_on_ranks.py"),
    "collectives": str(ROOT / "bench/speed_of_collectives.py"),
}
# Steps in a turn, a few tenths of a second together.
WORKLOADS = {"mnist": 3, "resnet20": 1, "large": 1, "small": 10, "transformer": 5}
WAYS = {"fit": 5, "loop": 5}
LIBRARIES = ("lightning", "transformers")
OF_TRAINERS = {f"{each}-{name}": WORKLOADS[name] for each in LIBRARIES for name in OVER_RANKS}
TURNS = 12
# In Keras 3 it trains custom loops only.
MIRRORED = "MultiWorkerMirroredStrategy"
# By name: what the ranks run, and the launcher that starts them. Without communication it is the
# one that gives each rank a session, as hvkit's does: else the limit would not be one on a busy
# machine. "Horovod" is hvkit's build without what makes it faster, "Horovod's names" the build as
# it is.
TORCH = {
    "alone": ("alone", "torchrun"),
    "alone, memory kept": ("alone, memory kept", "torchrun"),
    "hvkit": ("hvkit", "hvkit"),
    "hvkit, mpirun": ("hvkit", "mpirun"),
    "DDP": ("ddp", "torchrun"),
    "Horovod": ("horovod", "horovodrun"),
    "Horovod's names": ("horovod's names", "horovodrun"),
    "Accelerate": ("accelerate", "torchrun"),
    "Fabric": ("fabric", "fabric"),
}
KERAS = {
    "alone": ("alone", "torchrun"),
    "hvkit": ("hvkit", "hvkit"),
    MIRRORED: ("mwms", "processes"),
    "Horovod": ("horovod", "horovodrun"),
    "Horovod's names": ("horovod's names", "horovodrun"),
}
ON_GPUS = ("alone", "hvkit", "hvkit, mpirun", "DDP")
BESIDE_BUSY = (
    "alone",
    "alone, memory kept",
    "hvkit",
    "hvkit, mpirun",
    "DDP",
    "Horovod",
    "Horovod's names",
)
TRAINERS = {"hvkit": ("hvkit", "hvkit"), "DDP": ("ddp", "torchrun")}
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
    line = (
        "import os, numpy as np; x = np.random.rand(1 << 18)\n"
        f"while os.getppid() == {os.getpid()}: np.sort(x)"
    )
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
    line = command(launcher, str(ranks), script)
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=600)
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


def environment():
    return ENVIRONMENT | {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}


def peer_in_turns(launcher, ranks, script):
    """Start a peer that takes turns."""

    def start(path, output):
        to = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        if launcher != "processes":
            line = command(launcher, str(ranks), [*script, path])
            return [subprocess.Popen(line, env=environment(), **to)]
        # TensorFlow's own way: every process finds the others in TF_CONFIG.
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
        workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        for each in sockets:
            each.close()
        started = []
        for index in range(ranks):
            task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            own = environment() | {"TF_CONFIG": json.dumps(task)}
            started.append(subprocess.Popen([sys.executable, *script, path], env=own, **to))
        return started

    return Peer(ranks, start)


def best_decile(values):
    return sorted(values)[len(values) // 10]


def add(file, **record):
    with file.open("a") as opened:
        opened.write(json.dumps(record) + "\n")
    print(record, flush=True)


def train(flags):
    cases = [("torch", TORCH, name, steps) for name, steps in WORKLOADS.items()]
    if flags.gpu:
        on_gpus = {name: TORCH[name] for name in ON_GPUS}
        cases = [("torch", on_gpus, name, steps) for name, steps in WORKLOADS.items()]
    else:
        for_fit = {name: peer for name, peer in KERAS.items() if name != MIRRORED}
        cases += [("keras", for_fit, "fit", WAYS["fit"]), ("keras", KERAS, "loop", WAYS["loop"])]
        cases += [("trainers", TRAINERS, name, steps) for name, steps in OF_TRAINERS.items()]
    for number in range(flags.rounds):
        for framework, peers, workload, steps in cases:
            if not flags.only or workload in flags.only:
                train_a_round(flags, number, framework, peers, workload, steps)


def train_a_round(flags, number, framework, peers, workload, steps):
    """Start all peers anew: where memory lies makes one process a tenth faster than another."""
    script = [ON_RANKS[framework], *(["--gpu"] if flags.gpu else [])]
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                peer_in_turns(launcher, flags.ranks, [*script, kind, workload])
            )
            for name, (kind, launcher) in peers.items()
            if not flags.peers or name in flags.peers
        }
        for busy in (False, True):
            some = {n: peer for n, peer in started.items() if not busy or n in BESIDE_BUSY}
            with busy_processes(busy):
                taken = turns_of(some, steps)
            for name, seconds in taken.items():
                add(flags.records, kind="train", workload=workload, busy=busy, peer=name,
                    ranks=flags.ranks, round=number, ms=round(1e3 * seconds, 3))  # fmt: skip


def turns_of(peers, steps):
    """What each peer's step takes in the best decile of its turns."""
    taken = defaultdict(list)
    order = list(peers)
    for _ in range(TURNS):
        for name in order:
            taken[name].append(peers[name].take(steps))
        order.append(order.pop(0))
    return {name: best_decile(seconds) for name, seconds in taken.items()}


def collectives(flags):
    for number in range(flags.rounds):
        for peer, launcher in COLLECTIVES.items():
            (times, *_) = run(launcher, flags.ranks, [ON_RANKS["collectives"], peer])
            add(flags.records, kind="collectives", peer=peer, ranks=flags.ranks, round=number,
                ms=[round(1e3 * t, 4) for t in times])  # fmt: skip


def start(flags):
    for number in range(flags.rounds):
        for framework, peers in STARTS.items():
            for peer, (kind, launcher) in peers.items():
                workload = "mnist" if framework == "torch" else "loop"
                begun = time.time()
                ends = run(launcher, flags.ranks, [ON_RANKS[framework], kind, workload])
                seconds, ended = max(end for (end,) in ends) - begun, time.time() - begun
                add(flags.records, kind="start", framework=framework, peer=peer,
                    ranks=flags.ranks, round=number, seconds=round(seconds, 3),
                    ended=round(ended, 3))  # fmt: skip


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
    kinds = by_kind(flags.records)
    tables = defaultdict(dict)
    for (ranks, busy, workload), peers in by_round(
        kinds["train"], "ranks", "busy", "workload"
    ).items():
        tables[ranks, busy][workload] = peers
    for (ranks, busy), workloads in tables.items():
        columns = list(dict.fromkeys(peer for peers in workloads.values() for peer in peers))
        columns.remove("hvkit")
        print(f"\n{ranks} ranks, {'beside busy processes' if busy else 'idle'}: hvkit's ms a step,")
        print("and its speed beside that of its peers\n")
        print("| | hvkit | " + " | ".join(columns) + " |")
        print("|---" * (len(columns) + 2) + "|")
        for workload, peers in workloads.items():
            ms = statistics.median(each["ms"] for each in peers["hvkit"].values())
            cells = [shown(ratios(peers, "hvkit", peer)) for peer in columns]
            print(f"| {workload} | {ms:.1f} | " + " | ".join(cells) + " |")
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


def by_kind(file):
    kinds = defaultdict(list)
    for line in file.read_text().splitlines():
        record = json.loads(line)
        kinds[record["kind"]].append(record)
    return kinds


def picture(flags):
    import matplotlib.pyplot as plt

    # Text stays text, and the same records give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speed"})
    cases = by_round(
        [r for r in by_kind(flags.records)["train"] if r["workload"] in WORKLOADS],
        "workload",
        "busy",
        "ranks",
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
    axes[0].set(ylabel="speed, 1 = without communication", ylim=(0, 1.9))  # room for the legend
    axes[0].legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    draw_over_ranks(cases)


def draw_over_ranks(cases):
    """Samples a second of all ranks, and the part of their speed without communication."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for workload, style in zip(OVER_RANKS, ("o-", "s--"), strict=True):
        for peer, color in zip((LIMIT, "hvkit", "DDP"), ("grey", "C0", "C1"), strict=True):
            points = {
                ranks: peers
                for (name, busy, ranks), peers in sorted(cases.items())
                if name == workload and not busy and peer in peers and LIMIT in peers
            }
            label = f"{peer}, {workload}"
            rates = [
                statistics.median(BATCH * ranks * 1e3 / each["ms"] for each in peers[peer].values())
                for ranks, peers in points.items()
            ]
            axes[0].plot(list(points), rates, style, color=color, label=label)
            if peer != LIMIT:
                parts = {
                    ranks: statistics.median(ratios(peers, peer, LIMIT))
                    for ranks, peers in points.items()
                    if ranks > 1
                }
                axes[1].plot(list(parts), list(parts.values()), style, color=color, label=label)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(points), list(points))
        axis.set(xlabel="ranks on two cores")
    axes[0].set(ylabel="samples a second, all ranks", yscale="log")
    axes[1].set(ylabel="efficiency, 1 = without communication", ylim=(0, 1.05))
    axes[1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(PICTURE_OVER_RANKS, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {each.__name__: each for each in (train, collectives, start, report, picture)}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="workloads")
    parser.add_argument("--peers", nargs="+", default=[], help="for train; all by default")
    parser.add_argument("--gpu", action="store_true", help="each rank trains on a GPU")
    parser.add_argument("--records", type=Path, default=ROOT / "bench/speed.jsonl")
    flags = parser.parse_args()
    commands[flags.command](flags)


if __name__ == "__main__":
    main()
