"""What a deferred_init() block refuses to record, and what a recording refuses to make."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.deferred_init import deferred_init
from hvkit.frameworks.pytorch.model_parallel.init_recording import recording_of


def deferred(build):
    with deferred_init():
        return build()


def reads_random(read):
    return lambda: read(nn.Linear(2, 2).weight)


REFUSED_IN_THE_BLOCK = {
    "item": (
        reads_random(lambda w: w.sum().item()),
        r"\.item\(\) needs the values.*which other ranks may draw differently: compute",
    ),
    "if": (reads_random(lambda w: 1 if w.sum() > 0 else 0), r"\.item\(\) needs the values"),
    "tolist": (reads_random(lambda w: w.tolist()), "torch's tolist needs the values"),
    "numpy": (reads_random(lambda w: w.detach().numpy()), "torch's numpy needs the values"),
    "mask": (reads_random(lambda w: w[w > 0]), "torch's index needs the values"),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        "torch's allclose needs the values",
    ),
    "generator": (
        lambda: torch.rand(3, generator=torch.Generator()),
        "torch's rand draws with a torch.Generator of the script.*leave the generator out",
    ),
    "generator, trunc_normal_": (
        lambda: nn.init.trunc_normal_(torch.empty(30), generator=torch.Generator()),
        "draws with a torch.Generator of the script",
    ),
    "random numbers into a real tensor": (
        torch.tensor([1.0, 2.0]).normal_,
        r"torch's normal_ changes a tensor of shape \(2,\) .* make it with torch.empty",
    ),
    "deferred into a real tensor": (
        partial(lambda real: real.add_(torch.ones(2)), torch.tensor([1.0, 2.0])),
        "torch's add_ changes a tensor",
    ),
    "no meta": (
        lambda: torch.binomial(torch.ones(3), torch.ones(3) / 2),
        "torch's binomial does not work on PyTorch's meta device.*before the block",
    ),
    "sparse": (
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 2).long(), torch.ones(2), (3,)),
        "layout torch.sparse_coo.*before the block",
    ),
    "another device": (
        lambda: torch.ops.aten.empty([3], device=torch.device("xpu", 0)),
        r"empty with device='xpu:0'.*leave the device out",
    ),
    "of an earlier block": (
        partial(lambda module: module.weight + 1, deferred(lambda: nn.Linear(2, 2))),
        "not made in this block: make the whole model in one block",
    ),
}


@pytest.mark.parametrize(
    ("build", "message"), REFUSED_IN_THE_BLOCK.values(), ids=REFUSED_IN_THE_BLOCK
)
def test_refused_in_the_block(build, message):
    with pytest.raises(ValueError, match=message):
        deferred(build)


NOT_MADE = "is on the meta device, but was not made inside"


def zeroed(layer):
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            nn.Linear.double,
            f"{NOT_MADE}.*or was converted, copied or replaced after it: do",
        ),
        (copy.deepcopy, NOT_MADE),
        (zeroed, "was changed in place after its.*do that inside the block"),
        (lambda layer: deferred(lambda: nn.Linear(3, 3)), "is of another hvkit.def.*in one block"),
        (lambda layer: nn.Linear(3, 3, device="meta"), NOT_MADE),
    ],
)
def test_parameters_changed_after_the_block_are_refused_by_name(change, message):
    model = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    recording = recording_of(model)
    model[1] = change(model[1])
    with pytest.raises(ValueError, match=f"parameter 1.weight of Sequential {message}"):
        recording_of(model)
    with pytest.raises(ValueError, match=rf"tensor of shape \(3, 3\) {message}"):
        recording.make(model.parameters())


def test_a_buffer_that_was_converted_is_refused_by_name():
    model = deferred(lambda: nn.BatchNorm1d(2))
    model.register_buffer("running_mean", model.running_mean.half())
    with pytest.raises(ValueError, match="buffer running_mean of BatchNorm1d is on the meta"):
        recording_of(model)


def test_a_large_tensor_that_changes_before_the_model_is_made_is_refused():
    values = torch.ones(1 << 20)
    model = deferred(lambda: nn.ParameterList([torch.empty(1 << 20).copy_(values)]))
    values.add_(1)
    with pytest.raises(ValueError, match=r"shape \(1048576,\) was copied into the model.*clone"):
        recording_of(model).make_all()
