"""What each framework supports, as its table says; and which arguments do not go together."""

from functools import partial
from pathlib import Path

import pytest

import hvkit
from hvkit.capabilities import STRATEGIES, SUPPORT, refuse_unsupported
from hvkit.mesh import AXES, MeshOptions, MeshPosition
from hvkit.registry import JAX, KERAS_IN_PYTORCH_LOOP, KERAS_ON_JAX, KERAS_ON_TENSORFLOW, PYTORCH
from hvkit.runtime import Group
from hvkit.sync.port import Options

TOP_K, POWER_SGD = hvkit.TopK(ratio=0.1), hvkit.PowerSGD(rank=1)


def options(mesh=None, schedule="GPipe", plan=None, **given):
    """Arguments of ``distribute`` on four ranks, those that were left out at their defaults."""
    defaults = {
        "accumulate": 1,
        "warmup_steps": 0,
        "compression": None,
        "batch_norm": "average",
        "check_every": None,
        "on_nonfinite": "ignore",
        "strategy": hvkit.Synchronous(),
    }
    in_mesh = mesh and MeshOptions(MeshPosition(mesh, 0), 8, schedule, "flops", plan)
    return Options(**defaults | given, group=Group(0, (0, 1, 2, 3)), mesh=in_mesh)


axes = partial(hvkit.Mesh, 1)
REFUSED = [
    (PYTORCH, {"strategy": hvkit.LocalSGD(2), "batch_norm": "sync"}, 'use batch_norm="average"'),
    (PYTORCH, {"strategy": hvkit.ParameterServer(2), "check_every": 3}, "check_every=3 compares"),
    (PYTORCH, {"strategy": hvkit.Gossip(), "on_nonfinite": "skip"}, "on_nonfinite='skip' looks"),
    (PYTORCH, {"strategy": hvkit.FullyShard(), "on_nonfinite": "stop"}, "not averaged as a whole"),
    (PYTORCH, {"strategy": hvkit.FullyShard(), "batch_norm": "sync"}, "or layers without batch"),
    (PYTORCH, {"strategy": hvkit.FullyShard(), "check_every": 1}, "another part of them"),
    (PYTORCH, {"strategy": hvkit.FullyShard(), "accumulate": 2}, "accumulate=2 is not needed"),
    (PYTORCH, {"strategy": hvkit.Gossip(), "compression": TOP_K}, "leave compression out"),
    (PYTORCH, {"compression": POWER_SGD, "on_nonfinite": "skip"}, "would keep NaN"),
    (PYTORCH, {"mesh": axes(pipeline=2), "batch_norm": "sync"}, "does not work in micro-batches"),
    (PYTORCH, {"mesh": axes(tensor=2), "strategy": hvkit.Gossip()}, "use Synchronous, LocalSGD, D"),
    (PYTORCH, {"mesh": axes(shard=2), "strategy": hvkit.LocalSGD(2)}, "use the data axis instead"),
    (PYTORCH, {"mesh": axes(shard=2), "compression": TOP_K}, "where PyTorch averages gradients"),
    (PYTORCH, {"mesh": axes(shard=2), "schedule": "DualPipeV"}, "schedule='DualPipeV' runs"),
    (KERAS_ON_TENSORFLOW, {"accumulate": 2}, "pass gradient_accumulation_steps=2"),
    (KERAS_ON_TENSORFLOW, {"strategy": hvkit.FullyShard()}, "FullyShard.* needs PyTorch, whose"),
    (KERAS_ON_TENSORFLOW, {"mesh": axes(tensor=2)}, "the axis tensor of .* .KERAS_BACKEND=jax"),
    (KERAS_ON_TENSORFLOW, {"mesh": axes(pipeline=2), "schedule": "1F1B"}, "for models of PyTorch"),
    (KERAS_ON_TENSORFLOW, {"mesh": axes(pipeline=2), "plan": {"a": "b"}}, "along a tensor axis"),
    (KERAS_ON_TENSORFLOW, {"mesh": axes(pipeline=2), "on_nonfinite": "stop"}, "no rank of"),
    (JAX, {"accumulate": 3}, r"optax.MultiSteps\(tx, every_k_schedule=3\)"),
    (JAX, {"on_nonfinite": "skip"}, "optax.apply_if_finite"),
    (JAX, {"warmup_steps": 5}, "warmup_steps=5 is not for JAX: use a schedule of Optax"),
    (JAX, {"compression": TOP_K}, "compute in jax.numpy.bfloat16"),
    (JAX, {"batch_norm": "local"}, "its statistics are those of all"),
    (JAX, {"strategy": hvkit.Gossip()}, "Gossip.* which has DiLoCo, FullyShard, Lo"),
    (JAX, {"strategy": hvkit.DiLoCo(4, overlap=1)}, "leave overlap out"),
    (JAX, {"mesh": axes(pipeline=2)}, "one function for all ranks: use the axes data, shard and"),
    (JAX, {"mesh": axes(tensor=2), "plan": {"a": "b"}}, "by their longest dimensions"),
    (JAX, {"mesh": axes(tensor=2), "strategy": hvkit.LocalSGD(2)}, "does not work along the data"),
    (JAX, {"mesh": axes(shard=2), "strategy": hvkit.FullyShard()}, "among some: leave one out"),
    (KERAS_ON_JAX, {"strategy": hvkit.LocalSGD(2)}, "KERAS_BACKEND=torch or tensorflow"),
    (KERAS_ON_JAX, {"accumulate": 2}, "is not for Keras on JAX: pass gradient_accumulation_steps"),
    (KERAS_ON_JAX, {"on_nonfinite": "stop"}, "TerminateOnNaN"),
]


@pytest.mark.parametrize(
    ("framework", "given", "message"), REFUSED, ids=[f"{f.name}: {m}" for f, _, m in REFUSED]
)
def test_options_that_do_not_go_together_are_named_with_the_fix(framework, given, message):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(framework, options(**given))


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        (PYTORCH, {"strategy": hvkit.FullyShard()}),
        (PYTORCH, {"strategy": hvkit.LocalSGD(2), "mesh": axes(tensor=2), "plan": {"a": "b"}}),
        (PYTORCH, {"mesh": axes(shard=2), "schedule": "1F1B"}),
        (KERAS_IN_PYTORCH_LOOP, {"accumulate": 2}),
        (KERAS_ON_JAX, {"warmup_steps": 5, "check_every": 3}),
        (JAX, {"strategy": hvkit.FullyShard(), "mesh": axes(tensor=2), "batch_norm": "sync"}),
    ],
)
def test_options_that_go_together_are_accepted(framework, given):
    refuse_unsupported(framework, options(**given))


def test_the_docs_have_the_table_of_frameworks():
    def listed(strategies):
        missing = [each.__name__ for each in STRATEGIES if each not in strategies]
        if len(missing) > 1:
            return ", ".join(each.__name__ for each in strategies)
        return f"all but {missing[0]}" if missing else "all"

    page = (Path(__file__).parents[2] / "docs/strategies.md").read_text()
    for framework, support in SUPPORT.items():
        if framework is not KERAS_IN_PYTORCH_LOOP:
            found = [each for each in AXES if each in support.axes]
            cells = (
                framework.name,
                listed([each for each in STRATEGIES if issubclass(each, support.strategies)]),
                ", ".join(found),
            )
            assert f"| {' | '.join((*cells, listed(support.in_mesh)))} |\n" in page
