"""Models built in a deferred_init() block: the plain constructor's weights, and what is refused."""

import copy
import gc
import io
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from cases import MORE, cases
from torch import nn

import hvkit
from hvkit.frameworks.pytorch.model_parallel.deferred_init import deferred_init
from hvkit.frameworks.pytorch.model_parallel.init_recording import Call, recording_of


def deferred(build, seed=7):
    torch.manual_seed(seed)
    with deferred_init():
        return build()


def made(build):
    model = deferred(build)
    if recording := recording_of(model):
        recording.make_all()
    return model


def facts(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (type(t), t.dtype, t.device, t.stride(), t.requires_grad, t.tolist())
        for name, t in tensors.items()
    }


def assert_as_without_the_block(model, build):
    """Its weights are those that ``build`` makes, and so are random numbers drawn later."""
    later = torch.rand(3)
    torch.manual_seed(7)
    assert facts(model) == facts(build())
    assert torch.equal(torch.rand(3), later)


class Holder(nn.Module):
    """Parameters and buffers by name."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


class Tied(nn.Module):
    """Draws twice for each weight, as nanoGPT does."""

    def __init__(self, width=8, vocabulary=20):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width, padding_idx=0)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        return self.head(self.body(self.emb(x)))


class Rotary(nn.Module):
    """Tables computed from others; one is a plain attribute."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(16.0), 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles).conj())
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4) == 0)
        self.register_buffer("literal", torch.tensor([1.0, 2.0]))
        self.table = torch.arange(4) + 1
        self.linear = nn.Linear(3, 3)


def initialised(initialise):
    return nn.ParameterList([initialise(nn.Parameter(torch.empty(6, 5))), torch.empty(3).normal_()])


def in_parts():
    weight = nn.Parameter(torch.empty(6, 5))
    nn.init.xavier_uniform_(weight[:3])
    nn.init.normal_(weight[3:])
    return Holder(weight=weight, turned=nn.Parameter(weight.detach().t().contiguous()))


def drawn_buffers():
    return Holder(
        permuted=torch.randperm(5),
        integers=torch.randint(0, 9, (4,)),
        coins=torch.bernoulli(torch.rand(5)),
        dropped=nn.functional.dropout(torch.ones(9)),
        chosen=torch.multinomial(torch.rand(10), 3),
        like_a_literal=torch.randn_like(torch.tensor([1.0, 2.0])),
        in_a_literal=torch.tensor([1.0, 2.0]).uniform_(),
        scaled=torch.from_numpy(np.full(3, 2.0)) * torch.rand(3),
    )


def noised():
    """Draws like tensors whose values depend on earlier draws."""
    weight = torch.zeros(4, 6)[:, 1:5].t()
    for _ in range(3):
        weight += torch.randn_like(weight) + torch.rand_like(weight[:1])
        weight += torch.randint_like(weight, 9) + torch.bernoulli(weight, 0.5)
        weight += torch.empty_like(weight).copy_(weight).bernoulli_(0.5)
        weight += nn.functional.dropout(weight) + weight.clone().normal_()
    return Holder(weight=weight)


def seeded():
    """Sets the seed of before the block again, a state saved in the block, and one of a fork."""
    layers = [nn.Linear(3, 3)]
    torch.manual_seed(7)
    layers.append(nn.Linear(3, 3))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers.append(nn.Linear(3, 3))
    saved = torch.get_rng_state()
    layers.append(nn.Linear(3, 3))
    torch.set_rng_state(saved)
    layers.append(nn.Linear(3, 3))
    torch.manual_seed(11)
    return nn.Sequential(*layers)


def with_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(3, 3), Holder(thirds=torch.arange(3) / 3))
    finally:
        torch.set_default_dtype(torch.float32)


SAVED = io.BytesIO()
torch.save({"weight": torch.arange(16.0).view(4, 4), "bias": torch.ones(4)}, SAVED)


def loaded(read=lambda: torch.load(SAVED), **options):
    SAVED.seek(0)
    layer = nn.Linear(4, 4)
    layer.load_state_dict(read(), **options)
    return nn.Sequential(layer, nn.Linear(2, 2))


def of_numpy():
    weight = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    return {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(np.ones(4, "f4"))}


def copied():
    layer = nn.Linear(3, 4)
    return nn.Sequential(layer, copy.deepcopy(layer), nn.Linear(2, 2))


def other_generators():
    width = int(np.random.default_rng(0).integers(2, 5))
    return Holder(table=torch.as_tensor(np.random.default_rng(1).normal(size=width)))


INITIALISERS = [
    *(nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.eye_),
    *(nn.init.orthogonal_, nn.init.zeros_, partial(nn.init.sparse_, sparsity=0.3)),
]
ENCODER_LAYER = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}
MODELS = {
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 1)),
    "tied": Tied,
    "rotary": Rotary,
    "in parts": in_parts,
    "drawn buffers": drawn_buffers,
    "noised": noised,
    "seeded": seeded,
    "default dtype": with_default_dtype,
    "load_state_dict": partial(loaded, of_numpy),
    "load_state_dict, assign": partial(loaded, of_numpy, assign=True),
    "torch.load": loaded,
    "deepcopy": copied,
    "to": lambda: nn.Linear(3, 4).to("cpu", torch.float64),
    "double": lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)).double(),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "bfloat16": lambda: nn.Linear(3, 4, dtype=torch.bfloat16),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER_LAYER), 2),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "NumPy's numbers": other_generators,
    **{getattr(i, "func", i).__name__: partial(initialised, i) for i in INITIALISERS},
}


@pytest.mark.parametrize("name", cases(MODELS, list(MODELS)[::3]))
def test_a_model_and_later_random_numbers_are_as_without_the_block(name):
    assert_as_without_the_block(made(MODELS[name]), MODELS[name])


def test_draws_that_need_no_values_replay_nothing_in_the_block(monkeypatch):
    repeated, repeat = [], Call.repeat
    monkeypatch.setattr(Call, "repeat", lambda call, *args: repeated.append(repeat(call, *args)))
    model = deferred(noised)
    assert len(repeated) == len(recording_of(model).random_state) == 3 * 7
    recording_of(model).make_all()
    assert_as_without_the_block(model, noised)


def test_parameters_have_shapes_and_no_memory():
    with hvkit.deferred_init():
        model = nn.Linear(30, 20)
        huge = torch.zeros(1 << 20, 1 << 20)  # 4 TiB
    assert all(p.is_meta for p in model.parameters())
    assert model.weight.shape == (20, 30)
    assert huge.shape == (1 << 20, 1 << 20)


def test_shapes_pass_through_a_model_that_is_not_made():
    assert deferred(Tied)(torch.arange(5, device="meta")).shape == (5, 20)
    model = deferred(lambda: nn.Sequential(nn.BatchNorm1d(2), Rotary()))
    assert (model[0](torch.ones(4, 2, device="meta")) * model[1].literal).shape == (4, 2)
    recording_of(model).make_all()
    assert model[0].num_batches_tracked == 0
    assert model[1].table.tolist() == [1, 2, 3, 4]


def test_a_part_may_defer_itself():
    def part():
        with deferred_init():
            return nn.Linear(3, 3)

    model = made(lambda: nn.Sequential(nn.Linear(3, 3), part()))
    assert_as_without_the_block(model, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def fails():
    nn.init.trunc_normal_(nn.Linear(2, 2).weight)
    raise KeyError


@pytest.mark.parametrize("build", [lambda: torch.ones(3), fails], ids=["no draws", "fails"])
def test_random_numbers_are_untouched_where_the_block_draws_none_or_fails(build):
    torch.manual_seed(7)
    expected = torch.rand(3)
    with suppress(KeyError):
        deferred(build)
    assert torch.equal(torch.rand(3), expected)
    assert not nn.init.trunc_normal_(nn.Linear(2, 2).weight).is_meta
    assert nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def test_values_that_are_not_random_can_be_read_in_the_block():
    def build():
        rates = torch.linspace(0, 0.3, 4)
        assert torch.ones(2).sum() > 1
        assert rates.device.type == "cpu"
        assert nn.init.zeros_(nn.Linear(2, 2).weight).sum() == 0
        return (
            [rate.item() for rate in rates],
            rates.tolist(),
            rates.numpy(),
            np.asarray(rates),
            torch.tensor([rates[1], 2.0]).tolist(),
            rates[rates > 0.15].tolist(),
        )

    for read, right in zip(deferred(build), build(), strict=True):
        assert np.array_equal(read, right)


def test_a_small_tensor_may_be_filled_again_in_the_block():
    row = torch.empty(3)

    def build():
        row.fill_(1)
        weight = nn.Parameter(torch.zeros(2, 3))
        for number in range(2):
            with torch.no_grad():
                weight[number] = row.mul_(2)
        return Holder(weight=weight)

    assert_as_without_the_block(made(build), build)


def test_each_of_two_ranks_makes_its_half_and_the_rest_later():
    torch.manual_seed(7)
    plain = Tied()
    for half in (["emb.weight"], ["body.weight", "body.bias"]):
        model = deferred(Tied)
        # Its own random state changes nothing.
        recording_of(model).start_from(recording_of(model).random_state.clone())
        recording_of(model).make([model.get_parameter(name) for name in half])
        for name, parameter in model.named_parameters():
            assert parameter.is_meta == (name not in half)
            assert parameter.is_meta or torch.equal(parameter, plain.get_parameter(name))
        assert model.head.weight is model.emb.weight
        recording_of(model).make_all()
        assert_as_without_the_block(model, Tied)
        assert recording_of(model) is None


def test_parameters_stay_the_objects_that_they_were():
    model = deferred(lambda: nn.LSTM(4, 5))
    before, heard = dict(model.named_parameters()), []
    model.bias_ih_l0.note = "kept"
    model.bias_ih_l0.register_hook(lambda gradient: heard.append("hook"))
    model.bias_ih_l0.register_post_accumulate_grad_hook(lambda p: heard.append("accumulated"))
    recording_of(model).make_all()
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all(p is before[name] for name, p in zip(before, model._flat_weights, strict=True))
    model(torch.ones(2, 1, 4))[0].sum().backward()
    assert heard == ["hook", "accumulated"]
    assert model.bias_ih_l0.note == "kept"


def test_weights_that_share_memory_share_it_afterwards():
    def build():
        layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight.data = layer.weight.data
        return nn.Sequential(layer, other)

    model = made(build)
    assert model[0].weight is not model[1].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_a_model_is_found_by_its_parts_and_by_what_contains_it():
    part = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    whole = nn.Sequential(nn.Linear(2, 3), part)
    assert recording_of(whole) is recording_of(part) is recording_of(part[1]) is not None
    assert recording_of(nn.Linear(2, 2)) is None
    recording_of(whole).make([*whole.parameters()])
    assert whole(torch.ones(2)).shape == (3,)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_second_block_goes_on_where_the_first_ended(order):
    def block(build):
        with deferred_init():
            return build()

    models = deferred(Tied), block(Rotary)
    for number in order:
        recording_of(models[number]).make_all()
    later = torch.rand(3)
    torch.manual_seed(7)
    assert facts(models[0]) == facts(Tied())
    assert facts(models[1]) == facts(Rotary())
    assert torch.equal(torch.rand(3), later)


def test_a_rank_takes_another_ranks_weights_and_keeps_its_own_random_numbers():
    def build(seed):
        first = nn.Linear(3, 3)
        torch.manual_seed(seed)
        return nn.Sequential(first, nn.Linear(3, 3))

    torch.manual_seed(1)
    plain = build(10)
    state = recording_of(deferred(partial(build, 10), seed=1)).random_state
    assert state.dtype == torch.uint8
    assert len(state) == 4
    model = deferred(partial(build, 20), seed=2)
    recording_of(model).start_from(state)
    recording_of(model).make_all()
    assert facts(model) == facts(plain)
    own = torch.rand(3)
    build(20)
    assert torch.equal(torch.rand(3), own)


def test_a_seed_of_after_the_block_holds():
    model = deferred(Tied)
    torch.manual_seed(7)
    recording_of(model).make_all()
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


MEMORY = """
import re, torch
from torch import nn
from hvkit.frameworks.pytorch.model_parallel.deferred_init import deferred_init
from hvkit.frameworks.pytorch.model_parallel.init_recording import recording_of

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048) for _ in range(16))  # 8 MiB each
        self.apply(lambda m: nn.init.normal_(m.weight) if hasattr(m, "weight") else None)
        self.noise = torch.randn_like(torch.cat([m.weight for m in self.layers]).mean(0))

recording_of(nn.Linear(2, 2))
with deferred_init():
    nn.Linear(2, 2)
begin = peak()
with deferred_init():
    model = Late()
recording_of(model).make([model.layers[7].weight])
print(peak() - begin)
recording_of(model).make_all()
print(peak() - begin)
"""


@MORE
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_memory_is_that_of_what_is_wanted_and_of_one_tensor_in_the_block():
    # Else the C library learns to keep freed tensors, at sizes that differ from run to run.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    command = [sys.executable, "-c", MEMORY]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    part, whole = map(float, printed.stdout.split())
    assert part < 16, part  # MiB
    assert whole > 120


def test_a_model_that_is_dropped_takes_its_recording_along():
    model = deferred(Tied)
    recording = weakref.ref(recording_of(model))
    del model
    gc.collect()
    assert recording() is None
