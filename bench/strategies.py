"""All strategies on three workloads and four ranks: accuracy, bytes, and seconds over slow links.

    pip install -e '.[bench]'
    export HVKIT_DATA_DIR=...           # the folder of MNIST and CIFAR-10
    python bench/strategies.py learn    # an hour on two cores
    python bench/strategies.py sweep    # other settings, on the CIFAR-10 subset; half an hour
    python bench/strategies.py time     # as root, on four hosts made on this machine; half an hour
    python bench/strategies.py report   # prints tables, and draws docs/pictures/strategies_*.svg

The first three add records to bench/strategies.jsonl, and leave out what it has: delete a line to
measure it again. Names after the command choose workloads.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench/strategies.jsonl"
ON_RANKS = str(ROOT / "bench/strategies_on_ranks.py")
RANKS, SEEDS = 4, 3
# Milliseconds that a packet takes from host to host.
DELAYS = (1, 50)
BANDWIDTHS = {"1gbit": 1000, "100mbit": 100, "10mbit": 10}
# Text stays text, and the same records give the same file.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "strategies"})
WORKLOADS = {"mnist": "MNIST", "cifar": "CIFAR-10 subset", "text": "text"}

# Name in tables, strategy and compression as for the recipes. "sgd": settings of an optimizer of
# its own, where the workload's does not suit.
CASES = [
    ("Synchronous", "Synchronous", "none"),
    ("Synchronous, bf16", "Synchronous", "bf16"),
    ("Synchronous, int8", "Synchronous", "int8"),
    ("Synchronous, TopK 1%", "Synchronous", "TopK:ratio=0.01"),
    ("Synchronous, PowerSGD 4", "Synchronous", "PowerSGD:rank=4"),
    ("Centralized", "Centralized", "none"),
    ("ShardedOptimizer", "ShardedOptimizer", "none"),
    ("FullyShard", "FullyShard", "none"),
    ("LocalSGD 16", "LocalSGD:every=16", "none"),
    ("LocalSGD 16, int8", "LocalSGD:every=16", "int8"),
    ("DiLoCo 16", "DiLoCo:every=16", "none"),
    ("DiLoCo 16, int8", "DiLoCo:every=16", "int8"),
    ("DiLoCo 16, overlap 8", "DiLoCo:every=16,overlap=8", "none"),
    ("ElasticAveraging 16", "ElasticAveraging:every=16", "none"),
    ("Gossip ring", "Gossip", "none"),
    ("ParameterServer 3", "ParameterServer:staleness=3", "none"),
    ("DeMo", "DeMo", "none"),
]
# Strategies with a momentum of their own, or none, take steps of another size.
SGD = {"ParameterServer": {"lr": 0.2}, "DeMo": {"lr": 0.004}}

# Settings that the text of docs/strategies/figures.md speaks of, by what they are about; each is
# learned on the CIFAR-10 subset.
PLAIN = {"lr": 0.2}  # without momentum
SWEEPS = {
    "Steps in a round": [
        *((f"LocalSGD {every}", f"LocalSGD:every={every}", "none", {}) for every in (2, 4, 8)),
        (
            "LocalSGD 16, rate 0.1",
            "LocalSGD:every=16",
            "none",
            {"sgd": {"lr": 0.1, "momentum": 0.9}},
        ),
        ("Synchronous, rate 0.1", "Synchronous", "none", {"sgd": {"lr": 0.1, "momentum": 0.9}}),
    ],
    "DiLoCo's outer rate and momentum": [
        (f"DiLoCo 16, {lr}, {m}", f"DiLoCo:every=16,outer_lr={lr},outer_momentum={m}", "none", {})
        for lr, m in ((0.2, 0.8), (0.7, 0.3), (0.7, 0.5), (1.0, 0.3), (0.5, 0.9), (0.7, 0.9))
    ],
    "TopK with and without error feedback": [
        ("TopK 1%, no feedback", "Synchronous", "TopK:ratio=0.01", {"feedback": False}),
        ("Synchronous, no momentum", "Synchronous", "none", {"sgd": PLAIN}),
        ("TopK 1%, no momentum", "Synchronous", "TopK:ratio=0.01", {"sgd": PLAIN}),
        (
            "TopK 1%, no momentum, no feedback",
            "Synchronous",
            "TopK:ratio=0.01",
            {"sgd": PLAIN, "feedback": False},
        ),
    ],
}


def cases(workload):
    for name, strategy, compression in CASES:
        case = {"name": name, "strategy": strategy, "compression": compression}
        sgd = SGD.get(strategy.partition(":")[0])
        # The text is trained with AdamW, which needs no other rate under a parameter server.
        if sgd and not (workload == "text" and strategy.startswith("ParameterServer")):
            case["sgd"] = sgd
        yield case


def learn(workloads):
    """Train every case to the end, a few times, on ranks of this machine."""
    for workload in workloads:
        learn_cases(workload, cases(workload))


def sweep(_):
    """Train with other settings."""
    for some in SWEEPS.values():
        for name, strategy, compression, more in some:
            case = {"name": name, "strategy": strategy, "compression": compression, **more}
            learn_cases("cifar", [case])


def learn_cases(workload, some):
    done = {record["name"] for record in records("curve") if record["workload"] == workload}
    for case in some:
        if case["name"] not in done:
            launch = ["mpirun", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none"]
            command = [*launch, *on_ranks(workload, [case]), "--seeds", str(SEEDS)]
            add(subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True))


def measure_time(workloads):
    """Take some steps of every case on four hosts, over links of each bandwidth."""
    sys.path.insert(0, str(ROOT / "tests/cluster"))
    from rig import Rig

    nodes = [f"node{number}" for number in range(1, RANKS + 1)]
    hosts = ",".join(f"{node}:1" for node in nodes)
    launch = [sys.executable, "-m", "hvkit", "run", "-np", str(RANKS), "-H", hosts]
    for bandwidth in BANDWIDTHS:
        with Rig(nodes, bandwidth=bandwidth) as rig:
            for workload in workloads:
                done = {
                    record["name"]
                    for record in records("seconds")
                    if (record["workload"], record["bandwidth"]) == (workload, bandwidth)
                }
                left = [case for case in cases(workload) if case["name"] not in done]
                if left:
                    command = [*launch, *on_ranks(workload, left)]
                    result = rig.host("node1").run(command, env=environment(), timeout=1800)
                    add(result, bandwidth=bandwidth)


def on_ranks(workload, some):
    return [sys.executable, ON_RANKS, workload, json.dumps(some)]


def environment():
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'recipes'}", "OMP_NUM_THREADS": "1"}


def add(result, **more):
    """Add the records that rank 0 has printed, and show that they have come."""
    output = result.stdout if isinstance(result.stdout, str) else result.stdout.decode()
    if result.returncode:
        sys.exit(f"{output}\n{result.stderr}")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    with RECORDS.open("a") as file:
        for record in ({**json.loads(line), **more} for line in lines):
            file.write(json.dumps(record) + "\n")
            shown = record["curve"][-1] if "curve" in record else record["seconds"]
            print(record["workload"], record["name"], *more.values(), shown, flush=True)


def records(key):
    """The records that have this key: ``curve`` or ``seconds``."""
    if not RECORDS.exists():
        return []
    every = map(json.loads, RECORDS.read_text().splitlines())
    return [record for record in every if key in record]


def report(workloads):
    """Print a table for each workload, and draw the pictures."""
    learned = {workload: by_name(workload, "curve") for workload in workloads}
    timed = {workload: by_name(workload, "seconds") for workload in workloads}
    for workload in workloads:
        print_table(workload, learned[workload], timed[workload])
    print_sweeps()
    with picture("bytes", workloads) as places:
        for workload, place in places.items():
            draw_bytes(place, workload, learned[workload])
    if with_time := [workload for workload in workloads if timed[workload]]:
        with picture("time", with_time) as places:
            for workload, place in places.items():
                draw_time(place, workload, learned[workload], timed[workload])


@contextmanager
def picture(name, workloads):
    """A picture with a place for each workload, and one legend."""
    size = {"figsize": (max(6, 4.2 * len(workloads)), 5), "squeeze": False}
    figure, axes = plt.subplots(1, len(workloads), **size)
    yield dict(zip(workloads, axes.flat, strict=True))
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.25, 1, 1))
    figure.savefig(ROOT / f"docs/pictures/strategies_{name}.svg", metadata={"Date": None})


def by_name(workload, key, names=None):
    """The records of a workload's cases."""
    found = defaultdict(list)
    for record in records(key):
        if record["workload"] == workload:
            found[record["name"]].append(record)
    return {name: found[name] for name in names or [case[0] for case in CASES] if name in found}


def print_sweeps():
    """Print what other settings reach on the CIFAR-10 subset, beside the settings of the table."""
    beside = {
        "Steps in a round": ["Synchronous", "LocalSGD 16"],
        "DiLoCo's outer rate and momentum": ["LocalSGD 16", "DiLoCo 16"],
        "TopK with and without error feedback": ["Synchronous", "Synchronous, TopK 1%"],
    }
    for title, some in SWEEPS.items():
        print(f"\n| {title} | Accuracy, % |\n|---|---|")
        names = [*beside[title], *(case[0] for case in some)]
        for name, runs in by_name("cifar", "curve", names).items():
            print(f"| {name} | {at_the_end(runs)} |")


def at_the_end(runs):
    ends = [run["curve"][-1][1] for run in runs]
    return f"{statistics.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"


def print_table(workload, learned, timed):
    measure = "Bits a character" if workload == "text" else "Accuracy, %"
    delays = " | ".join(f"+{delay} ms" for delay in DELAYS)
    print(f"\n| {WORKLOADS[workload]} | {measure} | Bytes | {' | '.join(BANDWIDTHS)} | {delays} |")
    print("|---" * (3 + len(BANDWIDTHS) + len(DELAYS)) + "|")
    full = learned["Synchronous"][0]["bytes"]
    for name, runs in learned.items():
        one = runs[0]
        sent = ratio(one["bytes"] / full)
        if one["most_bytes"] > 1.05 * one["bytes"]:
            sent += f", at most {ratio(one['most_bytes'] / full)}"
        seconds = {each["bandwidth"]: 1000 * min(each["seconds"]) for each in timed.get(name, [])}
        links = [f"{seconds[each]:.0f}" if each in seconds else "" for each in BANDWIDTHS]
        waits = [one["most_messages"] * hops(name) * delay for delay in DELAYS]
        waits = [f"{wait:.0f}" if wait > 9.5 else f"{wait:.1f}" for wait in waits]
        print(f"| {name} | {at_the_end(runs)} | {sent} | {' | '.join(links + waits)} |")


def ratio(part):
    return f"{part:.2g}" if part > 0.7 else f"1/{1 / part:.3g}"


def hops(name):
    """How many times the network's delay a message of a case waits for, at most.

    A collective of Horovod's waits for its agreement, there and back, and then for each place of a
    ring, twice. A rank that sends to a server or to neighbours waits for one way or two.
    """
    if name.startswith("ParameterServer"):
        return 2
    return 2 + 1 if name.startswith("Gossip") else 2 + 2 * (RANKS - 1)


def draw_bytes(place, workload, learned):
    """What a case reaches, over what a rank sends."""
    for name, runs in learned.items():
        ends = [run["curve"][-1][1] for run in runs]
        sent = runs[0]["most_bytes"]
        mean = statistics.mean(ends)
        error = [[mean - min(ends)], [max(ends) - mean]]
        place.errorbar([sent], [mean], error, label=name, capsize=2, **look(name))
    place.set(xscale="log", xlabel="bytes a step, of the rank with most", title=WORKLOADS[workload])
    place.set_ylabel("bits a character" if workload == "text" else "accuracy, %")
    if workload == "text":
        place.invert_yaxis()


def draw_time(place, workload, learned, timed):
    """Seconds to a level that nearly all cases reach, over the links' bandwidth."""
    finals = {name: mean_curve(runs) for name, runs in learned.items()}
    reached = finals["Synchronous"][-1][1]
    level = reached * (1.05 if workload == "text" else 0.97)
    for name, curve in finals.items():
        steps = steps_to(level, curve, workload == "text")
        points = [
            (BANDWIDTHS[each["bandwidth"]], steps * min(each["seconds"]))
            for each in timed.get(name, [])
        ]
        if steps and points:
            place.plot(*zip(*sorted(points), strict=True), label=name, **look(name))
    place.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel="seconds")
    unit = "bits" if workload == "text" else "%"
    place.set_title(f"{WORKLOADS[workload]}: to {level:.3g} {unit}")


def mean_curve(runs):
    return [
        (steps[0][0], statistics.mean(value for _, value in steps))
        for steps in zip(*(run["curve"] for run in runs), strict=True)
    ]


def steps_to(level, curve, falls):
    """Steps until a curve reaches a level, between two points by proportion; 0 if never."""
    before = (0, curve[0][1])
    for steps, value in curve:
        if (value <= level) if falls else (value >= level):
            part = (level - before[1]) / (value - before[1]) if value != before[1] else 1
            return before[0] + part * (steps - before[0])
        before = steps, value
    return 0


def look(name):
    number = [each for each, _, _ in CASES].index(name)
    return {"color": plt.get_cmap("tab20")(number), "marker": "osD^v"[number % 5], "markersize": 5}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"learn": learn, "sweep": sweep, "time": measure_time, "report": report}
    parser.add_argument("command", choices=commands)
    parser.add_argument("workloads", nargs="*", help=", ".join(WORKLOADS))
    flags = parser.parse_args()
    commands[flags.command](flags.workloads or list(WORKLOADS))


if __name__ == "__main__":
    main()
