"""PyTorch: the script's hooks on parameters in a mesh see whole gradients of the whole batch."""

import functools

import pytest
from cases import MORE
from mesh_models import GPT
from mesh_training import MICROBATCHES, differences, tokens
from torch.autograd.graph import register_multi_grad_hook

import hvkit

pytestmark = MORE

DATA = hvkit.size() // 2
MESHES = {
    "stages": {"mesh": hvkit.Mesh(data=DATA, pipeline=2)},
    "1F1B": {"mesh": hvkit.Mesh(data=DATA, pipeline=2), "schedule": "1F1B"},
    "shards": {"mesh": hvkit.Mesh(data=DATA, shard=2), "together": 1},
    "tensor": {"mesh": hvkit.Mesh(data=DATA, tensor=2)},
}
if hvkit.size() == 4:
    MESHES |= {
        "shards of stages": {"mesh": hvkit.Mesh(shard=2, pipeline=2)},
        "shards of tensors": {"mesh": hvkit.Mesh(shard=2, tensor=2)},
        "tensors of stages": {"mesh": hvkit.Mesh(pipeline=2, tensor=2), "together": 4},
    }


def normalise(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient / gradient.norm())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
def test_a_hook_normalises_the_gradient_of_one_process(options, tied):
    microbatches = MICROBATCHES if options["mesh"].pipeline == 2 else None
    if options["mesh"].pipeline == 2 and options["mesh"].shard == 2:
        microbatches = 1  # PyTorch adds up the gradients of several
    make = functools.partial(GPT, layers=4, tied=tied)
    options = {"microbatches": microbatches} | options
    assert max(differences(make, tokens(5), prepare=normalise, **options)) < 1e-11


def test_a_hook_on_several_divided_parameters_is_refused():
    def count(model):
        register_multi_grad_hook(list(model.parameters()), print)

    with pytest.raises(ValueError, match="would never be called"):
        differences(
            functools.partial(GPT, layers=4),
            tokens(1),
            prepare=count,
            microbatches=None,
            **MESHES["shards"],
        )
