"""What ``bench/cost.py host`` starts: the time that hvkit or DDP adds to a step on the host.

Communication is left out: hvkit's means are there at once, and so are those of a hook of DDP's.
Steps beside a model of the same tensors that nobody distributes; rank 0 prints a line of JSON for
each number of tensors.
"""

import argparse
import json
import os
import time

import torch
from speed_on_ranks import Weights

TENSORS = (10, 160, 1000)
BLOCKS, STEPS = 60, 5


def hvkit_without_communication(model, optimizer):
    import hvkit
    from hvkit.frameworks.pytorch.wire import Wire

    hvkit.distribute(model, optimizer)
    wait = Wire.wait
    Wire.start_mean = Wire.start_sum = lambda self, tensor, name: -1
    Wire.wait = lambda self, handle: None if handle == -1 else wait(self, handle)
    return model


def ddp_without_communication(model, optimizer):
    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    distributed = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    distributed.register_comm_hook(None, hook)
    return distributed


PEERS = {"hvkit": hvkit_without_communication, "ddp": ddp_without_communication}


def host_time(peer, tensors):
    """Milliseconds that it adds to a step: the difference of the best deciles."""
    models = [Weights(tensors, 64) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    models[1] = PEERS[peer](models[1], optimizers[1])
    x = torch.zeros(1, 10)
    taken = [[], []]
    for _ in range(BLOCKS):
        for model, optimizer, some in zip(models, optimizers, taken, strict=True):
            start = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(x).sum().backward()
            some.append((time.perf_counter() - start) / STEPS)
    alone, distributed = (sorted(some)[BLOCKS // 10] for some in taken)
    return 1e3 * (distributed - alone)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.peer == "hvkit":
        import hvkit

        hvkit.init("torch")
        first = hvkit.rank() == 0
    else:
        first = os.environ["RANK"] == "0"
    for tensors in TENSORS:
        ms = host_time(flags.peer, tensors)
        if first:
            print(json.dumps({"tensors": tensors, "ms": round(ms, 3)}), flush=True)


if __name__ == "__main__":
    main()
