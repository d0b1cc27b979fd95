"""Lines of metrics.jsonl, as four ranks on two hosts write them."""

import json

HOSTS = ["node1", "node1", "node2", "node2"]


def start(step=0, **more):
    return {"start": {"time": 1e9 + step, "step": step, "hosts": HOSTS, **more}}


def record(step, loss=1.0, ranks=4, **more):
    return {
        "step": step,
        "time": 1e9 + step,
        "loss": loss,
        "steps": 10,
        "samples_per_second": 100.0 * ranks,
        "ranks": {"samples_per_second": [100.0] * ranks, "last": [1, 1, 1, 7][:ranks]},
        "seconds": {"step": 0.1, "data": 0.01, "compute": 0.05, "waiting": 0.03, "allreduce": 0.01},
        "sent": {"gradients": 2e6},
        "host": {"node1": {"cpu": 50.0}, "node2": {"cpu": 60.0}},
        **more,
    }


def logged(step, **values):
    return {"step": step, "time": 1e9 + step, "logged": values}


def end(step=None, **more):
    when = {} if step is None else {"time": 1e9 + step, "step": step}
    return {"end": {**when, **more}}


def write(folder, *lines):
    """Write lines, objects or plain text, to the folder's metrics.jsonl; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    (folder / "metrics.jsonl").write_text(text + "\n")
    return folder
