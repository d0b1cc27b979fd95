"""What ``bench/speed.py`` starts on every rank for collectives: the mean of one float32 tensor.

A rank prints one JSON list: the seconds that it took for each size, the best decile of its calls.
"""

import argparse
import json
import time

import torch

SIZES = (4 << 10, 64 << 10, 1 << 20, 10 << 20, 100 << 20)


def hvkit_mean():
    import hvkit

    hvkit.init("torch")
    from hvkit.frameworks.pytorch.wire import Wire

    wire = Wire("gradients")
    return lambda x: wire.wait(wire.start_mean(x, f"{x.nbytes} bytes"))


def mpi_mean():
    from mpi4py import MPI

    def mean(x):
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())
        x.div_(MPI.COMM_WORLD.size)

    return mean


def gloo_mean():
    torch.distributed.init_process_group("gloo")

    def mean(x):
        torch.distributed.all_reduce(x)
        x.div_(torch.distributed.get_world_size())

    return mean


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    peers = {"hvkit": hvkit_mean, "mpi4py": mpi_mean, "gloo": gloo_mean}
    parser.add_argument("peer", choices=peers)
    mean = peers[parser.parse_args().peer]()
    torch.set_num_threads(1)
    found = []
    for size in SIZES:
        x, taken = torch.ones(size // 4), []
        for _ in range(10 if size > 1 << 24 else 100):
            start = time.perf_counter()
            mean(x)
            taken.append(time.perf_counter() - start)
        found.append(sorted(taken)[len(taken) // 10])
    print("\n" + json.dumps(found) + "\n", flush=True)


if __name__ == "__main__":
    main()
