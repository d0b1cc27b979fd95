"""Models built in a deferred_init() block: the plain constructor's weights, and what is refused."""

import copy
import io
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import hvkit
from hvkit.frameworks.pytorch.model_parallel.deferred_init import deferred_init, recipe_of


def deferred(build, seed=7):
    torch.manual_seed(seed)
    with deferred_init():
        return build()


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_the_same(made, plain):
    assert tensors_of(made).keys() == tensors_of(plain).keys()
    for name, right in tensors_of(plain).items():
        tensor = tensors_of(made)[name]
        assert type(tensor) is type(right), name
        assert (tensor.dtype, tensor.device) == (right.dtype, right.device), name
        assert tensor.stride() == right.stride(), name
        assert tensor.requires_grad == right.requires_grad, name
        assert torch.equal(tensor, right), name


class Holder(nn.Module):
    """Holds tensors by name: parameters and buffers."""

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
    )


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


LOADED = {"weight": np.arange(16.0, dtype=np.float32).reshape(4, 4), "bias": np.ones(4, "f4")}


def loaded(**options):
    layer = nn.Linear(4, 4)
    layer.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in LOADED.items()}, **options)
    return nn.Sequential(layer, nn.Linear(2, 2))


SAVED = io.BytesIO()
torch.save({name: torch.from_numpy(values) for name, values in LOADED.items()}, SAVED)


def loaded_from_file():
    SAVED.seek(0)
    layer = nn.Linear(4, 4)
    layer.load_state_dict(torch.load(SAVED))
    return nn.Sequential(layer, nn.Linear(2, 2))


def copied():
    layer = nn.Linear(3, 4)
    return nn.Sequential(layer, copy.deepcopy(layer), nn.Linear(2, 2))


def other_generators():
    width = int(np.random.default_rng(0).integers(2, 5))
    return Holder(table=torch.as_tensor(np.random.default_rng(1).normal(size=width)))


INITIALISERS = [
    *(nn.init.xavier_normal_, nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.ones_),
    *(nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_),
    *(nn.init.zeros_, partial(nn.init.sparse_, sparsity=0.3), partial(nn.init.constant_, val=3.0)),
]
MODELS = {
    "linear": lambda: nn.Linear(3, 4),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 1)),
    "tied": Tied,
    "rotary": Rotary,
    "in parts": in_parts,
    "drawn buffers": drawn_buffers,
    "seeded": seeded,
    "default dtype": with_default_dtype,
    "load_state_dict": loaded,
    "load_state_dict, assign": lambda: loaded(assign=True),
    "torch.load": loaded_from_file,
    "deepcopy": copied,
    "half": lambda: nn.Linear(3, 4).half(),
    "to": lambda: nn.Linear(3, 4).to("cpu", torch.float64),
    "double": lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)).double(),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "bfloat16": lambda: nn.Linear(3, 4, dtype=torch.bfloat16),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
    ),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "NumPy's numbers": other_generators,
    **{getattr(i, "func", i).__name__: partial(initialised, i) for i in INITIALISERS},
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_model_and_later_random_numbers_are_as_without_the_block(build):
    torch.manual_seed(7)
    plain, later = build(), torch.rand(3)
    model = deferred(build)
    if recipe := recipe_of(model):
        recipe.make_all()
    assert_the_same(model, plain)
    assert torch.equal(torch.rand(3), later)


def test_nothing_is_allocated_in_the_block():
    model = deferred(lambda: nn.Linear(1 << 20, 1 << 20))  # 4 TiB
    assert all(p.is_meta for p in model.parameters())
    assert model.weight.shape == (1 << 20, 1 << 20)


def test_each_of_two_ranks_makes_its_half():
    torch.manual_seed(7)
    plain = Tied()
    for half in (["emb.weight"], ["body.weight", "body.bias"]):
        model = deferred(Tied)
        recipe_of(model).make([model.get_parameter(name) for name in half])
        for name, parameter in model.named_parameters():
            assert parameter.is_meta == (name not in half)
            assert parameter.is_meta or torch.equal(parameter, plain.get_parameter(name))
        assert model.head.weight is model.emb.weight


def test_the_rest_can_be_made_later():
    torch.manual_seed(7)
    plain, later = Tied(), torch.rand(3)
    model = deferred(Tied)
    recipe_of(model).make([model.body.bias])
    assert torch.equal(torch.rand(3), later)
    recipe_of(model).make_all()
    assert_the_same(model, plain)
    assert recipe_of(model) is None


def test_parameters_stay_the_objects_that_they_were():
    model = deferred(lambda: nn.LSTM(4, 5))
    before, heard = dict(model.named_parameters()), []
    model.bias_ih_l0.note = "kept"
    model.bias_ih_l0.register_hook(lambda gradient: heard.append("hook"))
    model.bias_ih_l0.register_post_accumulate_grad_hook(lambda p: heard.append("accumulated"))
    recipe_of(model).make_all()
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all(p is before[name] for name, p in zip(before, model._flat_weights, strict=True))
    model(torch.ones(2, 1, 4))[0].sum().backward()
    assert heard == ["hook", "accumulated"]
    assert model.bias_ih_l0.note == "kept"


def test_an_optimizer_of_before_updates_what_is_made():
    def trained(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()
        return model

    torch.manual_seed(7)
    plain = Tied()
    trained(plain, torch.optim.AdamW(plain.parameters(), 0.1))
    model = deferred(Tied)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    recipe_of(model).make_all()
    assert_the_same(trained(model, optimizer), plain)


def test_shapes_pass_through_a_model_that_is_not_made():
    assert deferred(Tied)(torch.arange(5, device="meta")).shape == (5, 20)


def test_plain_attributes_are_made_too():
    model = deferred(Rotary)
    recipe_of(model).make_all()
    assert model.table.tolist() == [1, 2, 3, 4]


def test_weights_that_share_memory_share_it_afterwards():
    def build():
        layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight.data = layer.weight.data
        return nn.Sequential(layer, other)

    model = deferred(build)
    recipe_of(model).make_all()
    assert model[0].weight is not model[1].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_a_model_is_found_by_its_parts_and_by_what_contains_it():
    part = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    whole = nn.Sequential(nn.Linear(2, 3), part)
    assert recipe_of(whole) is recipe_of(part) is recipe_of(part[1]) is not None
    assert recipe_of(nn.Linear(2, 2)) is None
    recipe_of(whole).make([*whole.parameters()])
    assert whole(torch.ones(2)).shape == (3,)


def test_a_part_may_defer_itself():
    def part():
        with deferred_init():
            return nn.Linear(3, 3)

    model = deferred(lambda: nn.Sequential(nn.Linear(3, 3), part()))
    recipe_of(model).make_all()
    torch.manual_seed(7)
    assert_the_same(model, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_a_second_block_goes_on_where_the_first_ended():
    def both(first, second):
        torch.manual_seed(7)
        return first(), second()

    encoder, decoder = both(Tied, Rotary)
    later = torch.rand(3)

    def block(build):
        with deferred_init():
            return build()

    for order in ([0, 1], [1, 0]):
        models = both(lambda: block(Tied), lambda: block(Rotary))
        for number in order:
            recipe_of(models[number]).make_all()
        assert_the_same(models[0], encoder)
        assert_the_same(models[1], decoder)
        assert torch.equal(torch.rand(3), later)


def test_ranks_take_another_ranks_random_numbers_and_keep_their_own():
    def build():
        first = nn.Linear(3, 3)
        torch.manual_seed(torch.initial_seed() % 100)
        return nn.Sequential(first, nn.Linear(3, 3))

    first, model = deferred(build, seed=1), deferred(build, seed=2)
    recipe_of(model).start_from(recipe_of(first).random_state)
    recipe_of(first).make_all()
    torch.manual_seed(2)
    own = torch.rand(3)
    model = deferred(build, seed=2)
    recipe_of(model).start_from(recipe_of(deferred(build, seed=1)).random_state)
    del first
    torch.manual_seed(2)
    with deferred_init():
        model = build()
    recipe_of(model).start_from(recipe_of(model).random_state)
    assert own.shape == (3,)
