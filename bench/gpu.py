"""What hvkit gives and costs on one NVIDIA GPU, in one table.

    python bench/gpu.py                 # everything, some minutes
    python bench/gpu.py one two         # some parts
    python bench/gpu.py one --device cpu

Parts:
    one      one rank through Horovod trains what a script without hvkit trains
    two      two ranks that share the GPU train what one process with twice the batch trains
    mesh     two ranks that share the GPU hold a part of a model each
    sync     what the host waits for in a step
    speed    a step beside plain PyTorch and DDP on NCCL
    horovod  Horovod's own mean, and a step with its wrapper beside plain PyTorch

hvkit itself starts nothing for a single process. A rank here goes through Horovod and NCCL all the
same, so that the one GPU shows what every GPU of a large run pays beside the network.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import gpu_meshes
import gpu_steps
import gpu_trainings
import torch

PARTS = ("one", "two", "mesh", "sync", "speed", "horovod")
LIMIT_S = 240


class _One(int):
    """A number of ranks, one, that hvkit takes for several."""

    def __gt__(self, other):
        return other == 1 or int(self) > other

    def __eq__(self, other):
        return isinstance(other, _One)

    __hash__ = int.__hash__


def start_alone():
    """Start Horovod with one rank, and let hvkit treat it as one of several."""
    from hvkit import runtime
    from hvkit.runtime import Group
    from hvkit.transport.engines import PyTorchEngine

    os.environ.update({each.variable: each.value for each in runtime.rank_settings(os.environ)})
    engine = PyTorchEngine()
    engine.take_device(0, 1)
    runtime._world = runtime._World(0, _One(1), 0, 1)
    runtime._engines["torch"] = engine
    Group.size = property(lambda group: _One(len(group.members)))


def part(name, flags):
    device = torch.device(flags.device)
    if name == "two":
        gpu_trainings.compare(device, flags.cases)
        return
    if name == "mesh":
        gpu_meshes.compare(device, flags.cases)
        return
    if name == "horovod":
        gpu_trainings.means_of_one_rank(device)
        gpu_steps.speed(device, gpu_steps.PEERS_OF_HOROVOD, flags.rounds, flags.seconds)
        return
    start_alone()
    if name == "one":
        gpu_trainings.compare(device, flags.cases)
    elif name == "sync":
        gpu_steps.host_waits(device)
    else:
        gpu_steps.speed(device, gpu_steps.PEERS, flags.rounds, flags.seconds)


def run(name, arguments, environ):
    """Run a part in processes of its own; returns its lines and what else it printed."""
    command = [sys.executable, __file__, *arguments, "--part", name]
    if name in ("two", "mesh"):
        command = ["hvkit", "run", "-np", "2", "--", *command[1:]]
    else:
        command = ["mpirun", "-np", "1", *command]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        said, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        status = f"more than {LIMIT_S} s"
    taken = time.monotonic() - begun
    lines, rest = [], []
    for line in said.splitlines():
        text = line[line.find("{") :] if "{" in line else ""
        try:
            lines.append(json.loads(text))
        except ValueError:
            rest.append(line)
    return lines, rest, status, taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block of steps")
    parser.add_argument("--cases", nargs="*", help="some of the cases of `one` and `two`")
    flags = parser.parse_args()
    if flags.part:
        part(flags.part, flags)
        return
    passed = ["--device", flags.device, "--rounds", str(flags.rounds)]
    passed += ["--seconds", str(flags.seconds)]
    passed += ["--cases", *flags.cases] if flags.cases else []
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "KERAS_BACKEND": "torch"}
    if flags.device == "cpu":
        environ["KERAS_TORCH_DEVICE"] = "cpu"
    rows = []
    for name in flags.parts:
        lines, rest, status, taken = run(name, passed, environ)
        print(f"\n## {name}: exit {status}, {taken:.0f} s", flush=True)
        for line in lines:
            print(json.dumps(line))
        wrong = [line for line in lines if line.get("right") is False]
        print(*(rest[-40:] if status or wrong else rest[:12]), sep="\n", flush=True)
        rows += rows_of(name, lines, status)
    of = torch.cuda.get_device_name() if flags.device == "cuda" else flags.device
    print(f"\n| PyTorch {torch.__version__}, {of} | |\n|---|---|")
    print(*(f"| {what} | {figures} |" for what, figures in rows), sep="\n")


def rows_of(name, lines, status):
    """What the table says of a part: pairs of texts."""
    if name in ("one", "two", "mesh"):
        right = sum(line["right"] for line in lines if "right" in line)
        ranks = {
            "one": "one rank",
            "two": "two ranks that share the GPU",
            "mesh": "two ranks that hold a model together",
        }[name]
        yield f"trainings equal to one process, {ranks}", f"{right} of {len(lines)}, exit {status}"
    for line in lines:
        if "waits of" in line:
            counts = ", ".join(f"{n} {what}" for what, n in line["a step"].items()) or "none"
            what = f"a step of {line['workload']}, {line['waits of']}: what the host waits for"
            host, whole = line["host ms"], line["step ms"]
            yield what, f"{counts}; host {host:.1f} ms of {whole:.1f} ms; {line.get('GiB')} GiB"
        elif name == "horovod" and "right" in line:
            yield line["case"], "right" if line["right"] else "wrong"
        elif "workload" in line:
            for peer, of in line.items():
                if not isinstance(of, dict) or peer == "plain":
                    continue
                yield (
                    f"speed of {line['workload']} with {peer}, plain PyTorch = 1",
                    f"{of['speed']:.3f} ({of['from']:.3f} to {of['to']:.3f}); {of['ms']:.2f} ms",
                )


if __name__ == "__main__":
    main()
