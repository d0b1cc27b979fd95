"""One process is the identity and needs no Horovod."""

import pytest
import tensorflow as tf
import torch
from cases import MORE, cases
from scripts import run_script

import hvkit

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'")
sys.meta_path.insert(0, Absent())
"""

COLLECTIVES = """
import hvkit
hvkit.init(); hvkit.barrier()
thing = object()
assert (hvkit.rank(), hvkit.size(), hvkit.local_rank(), hvkit.local_size()) == (0, 1, 0, 1)
assert hvkit.broadcast(thing) is thing
assert hvkit.allgather(thing) == [thing]
import numpy as np
assert hvkit.is_main()
with hvkit.main_first():
    pass
array = np.float32([0.1, np.nan, -np.inf])
for op in ("mean", "sum", "min", "max"):
    assert hvkit.allreduce(0.1, op) == 0.1 and hvkit.allreduce(3, op) == 3
    reduced = hvkit.allreduce(array, op)
    assert reduced is not array and reduced.tobytes() == array.tobytes()
def raises(error, call, *arguments):
    try:
        call(*arguments)
    except error as raised:
        return str(raised)
assert "got 42 of type int" in raises(TypeError, hvkit.average_buffers, 42)
assert "'product'" in raises(ValueError, hvkit.allreduce, 0.1, "product")
def fail():
    with hvkit.main_first():
        raise KeyError("x")
assert raises(KeyError, fail)
assert hvkit.mean(0.3, 7) == 0.3 / 7 and hvkit.mean(0, 0) != hvkit.mean(0, 0)
assert hvkit.average(0.1) == 0.1 and hvkit.average({"a": 1}) == {"a": 1.0}
"""

EVERYTHING = """
import hvkit
STRATEGIES = (
    hvkit.Synchronous(), hvkit.Centralized(), hvkit.ShardedOptimizer(), hvkit.LocalSGD(3),
    hvkit.DiLoCo(3), hvkit.DiLoCo(3, overlap=1), hvkit.ElasticAveraging(3), hvkit.Gossip(),
    hvkit.ParameterServer(2), hvkit.DeMo(),
)
COMPRESSIONS = "fp16", "bf16", "int8", hvkit.TopK(0.1), hvkit.PowerSGD(1)
"""

TORCH = """
import torch, hvkit
def train(distribute):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model, optimizer = distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        if distribute is not plainly:
            hvkit.reduce_gradients(model)
        optimizer.step()
    return torch.cat([p.flatten() for p in model.parameters()])
plainly = lambda model, optimizer: (model, optimizer)
plain = train(plainly)
options = {"lr_scaling": "linear", "warmup_steps": 5, "accumulate": 2, "check_every": 1}
assert torch.equal(plain, train(lambda m, o: hvkit.distribute(m, o, **options)))
for strategy in (*STRATEGIES, hvkit.FullyShard()):
    assert torch.equal(plain, train(lambda m, o: hvkit.distribute(m, o, strategy=strategy)))
for compression in COMPRESSIONS:
    assert torch.equal(plain, train(lambda m, o: hvkit.distribute(m, o, compression=compression)))
"""

KERAS = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras, numpy as np, hvkit
def train(distribute, rows=60, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)])
    model, optimizer = distribute(model, keras.optimizers.Adam(0.01))
    model.compile(optimizer=optimizer, loss="mse", **options)
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    model.fit(x, x[:, :4], batch_size=6, verbose=0)
    return np.concatenate([w.numpy().ravel() for w in model.weights])
plain = train(lambda model, optimizer: (model, optimizer))
options = {"lr_scaling": "linear", "warmup_steps": 5, "check_every": 1}
assert plain.tobytes() == train(lambda m, o: hvkit.distribute(m, o, **options)).tobytes()
plain = train(lambda model, optimizer: (model, optimizer), rows=18, run_eagerly=True)
for options in (
    *({"strategy": each} for each in STRATEGIES), *({"compression": each} for each in COMPRESSIONS)
):
    found = train(lambda m, o: hvkit.distribute(m, o, **options), rows=18, run_eagerly=True)
    assert plain.tobytes() == found.tobytes(), options
"""


LATE = """
from hvkit import allgather, mean
import torch
found = []
def backend(graph, inputs):
    found.extend(str(node.target) for node in graph.graph.nodes)
    return graph.forward
compiled = torch.compile(lambda x: mean((x * 2).sum(), 4) + allgather(x)[0].cos(), backend=backend)
assert compiled(torch.zeros(())) == 1
assert any("mul" in each for each in found) and not any("div" in each for each in found)
"""


@MORE
def test_a_compiled_loss_may_contain_calls_that_were_imported_before_pytorch():
    done = run_script(LATE)
    assert done.returncode == 0, done.stderr
    assert "does not know how to trace" not in done.stderr


def test_a_quotient_has_the_dtype_of_several_ranks():
    """As in tests/parallel/keras/test_keras_allgather.py."""
    whole = hvkit.mean(tf.constant(3), 2.5)
    assert float(whole) == pytest.approx(1.2, abs=1e-15)
    assert whole.dtype == tf.float64
    assert hvkit.mean(3, tf.constant(2.0, tf.float16)).dtype == tf.float16
    for value in (tf.complex(1.0, 1.0), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(TypeError, match="imaginary"):
            hvkit.mean(value, 2)


SCRIPTS = {"torch": TORCH, "collectives": COLLECTIVES, "keras": KERAS}


@pytest.mark.parametrize("name", cases(SCRIPTS, 2))
def test_one_process_is_the_identity_bit_for_bit_without_horovod(name):
    done = run_script(ABSENT + EVERYTHING + SCRIPTS[name])
    assert done.returncode == 0, done.stderr


def test_one_launched_process_does_not_need_horovod_either():
    done = run_script(ABSENT + COLLECTIVES, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("framework", "name"), cases([("torch", "PyTorch"), ("tensorflow", "TensorFlow")])
)
def test_several_launched_processes_without_horovod_are_told_how_to_get_it(framework, name):
    code = ABSENT + f"import {framework}, hvkit\nhvkit.init()"
    done = run_script(code, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hvkit.errors.HorovodNotFoundError: several ranks were launched")
    assert f"Horovod for {name} cannot be loaded" in last
    assert last.endswith("hvkit install-horovod")


def test_a_launcher_of_another_mpi_is_noticed():
    """mpirun says 2 ranks; the MPI that Horovod was built for, started alone, says 1."""
    done = run_script("import torch, hvkit\nhvkit.init()", PMI_SIZE="2", PMI_RANK="0")
    assert done.returncode == 1
    assert "launched 2 processes, but Horovod sees 1" in done.stderr
