"""What ``hvkit.Monitor`` adds to a training step, whatever the model.

    python bench/monitor_cost.py

Two ranks train a model of 36 weights, in PyTorch's loop and in Keras's ``fit``: without a monitor,
with one that only counts the steps, and with one that makes a record after each. Each has processes
of its own, in turns. Prints what a counted step and a record add, in microseconds: the difference
of the best deciles of short blocks, by round, then the median. By default records come about once a
second. Ten minutes, with nothing else running.
"""

import argparse
import json
import statistics
import tempfile
import time

from speed import best_decile, run

import hvkit

RANKS, ROUNDS = 2, 7
# Blocks of steps of a process. The end of a fit costs some records, so it comes rarely.
BLOCKS = {"torch": (25, 200), "keras": (6, 1000)}
# No monitor; counts only; records always.
PEERS = {"plain": None, "counted": 10**9, "recorded": 1}


def torch_blocks(monitor):
    import torch

    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    hvkit.distribute(model, optimizer, monitor=monitor)
    steps = BLOCKS["torch"][1]
    batches = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(steps)]

    def train():
        for x, y in monitor.batches(batches) if monitor else batches:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            if monitor:
                monitor.step(loss=loss)

    return blocks("torch", train)


def keras_blocks(monitor):
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.Adam()
    hvkit.distribute(model, optimizer, monitor=monitor)
    model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((8, 8)), tf.ones((8, 4)))).repeat()
    steps = BLOCKS["keras"][1]
    return blocks("keras", lambda: model.fit(data, steps_per_epoch=steps, verbose=0))


def blocks(framework, train):
    """Microseconds of a step, by block of ``train``."""
    train()
    found = []
    number, steps = BLOCKS[framework]
    for _ in range(number):
        begun = time.perf_counter()
        train()
        found.append(1e6 * (time.perf_counter() - begun) / steps)
    return found


def measure(framework, peer):
    """Print this rank's blocks."""
    hvkit.init({"torch": "torch", "keras": "tensorflow"}[framework])
    with tempfile.TemporaryDirectory() as folder:
        every = PEERS[peer]
        monitor = hvkit.Monitor(folder, every=every) if every else None
        found = {"torch": torch_blocks, "keras": keras_blocks}[framework](monitor)
        print(json.dumps(found), flush=True)
        if monitor:
            monitor.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("framework", nargs="?", choices=("torch", "keras"))
    parser.add_argument("peer", nargs="?", choices=tuple(PEERS))
    flags = parser.parse_args()
    if flags.framework:
        measure(flags.framework, flags.peer)
        return
    for framework in ("torch", "keras"):
        added = {"counted": [], "recorded": []}
        for number in range(ROUNDS):
            took = {}
            for peer in list(PEERS)[:: 1 if number % 2 else -1]:
                words = [__file__, framework, peer]
                took[peer] = max(map(best_decile, run("mpirun", RANKS, words)))
            added["counted"].append(took["counted"] - took["plain"])
            added["recorded"].append(took["recorded"] - took["counted"])
            print(framework, {peer: round(each) for peer, each in took.items()}, flush=True)
        for name, values in added.items():
            low, high = min(values), max(values)
            middle = statistics.median(values)
            print(f"{framework}, {name}: {middle:.0f} us ({low:.0f} to {high:.0f})", flush=True)


if __name__ == "__main__":
    main()
