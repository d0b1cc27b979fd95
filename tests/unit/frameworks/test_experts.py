"""Which experts in parameters of three dimensions can be divided, and why others cannot."""

import copy

import pytest
import torch
from mesh_models import Experts, ExpertsInTurns, MixtureNet
from torch import nn
from torch.nn import functional as F

from hvkit.frameworks.pytorch.model_parallel.tensor import experts
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import Placement
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import plan_layers

ROWS, WIDTH = 20, 16


class Routed(nn.Module):
    """Experts behind a router."""

    def __init__(self, experts, count=4, use=None):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = experts
        self.use = use

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        weights, places = shares.topk(2, -1)
        if self.use:
            return self.use(self, x, places, weights)
        return self.experts(x, places, weights)


def plan_of(experts, ways=2, train=True, **options):
    model = Routed(experts, **options).train(train)
    return plan_layers(model, (torch.ones(ROWS, WIDTH),), {}, ways)


def placements(experts, **options):
    plan = plan_of(experts, **options)
    assert plan.experts == {"experts"}
    return dict(plan.divisions["experts"].experts)


def reason(experts, **options):
    plan = plan_of(experts, **options)
    assert "experts" not in plan.divisions
    assert f"experts stays whole: {plan.whole['experts']}" in str(plan)
    return plan.whole["experts"]


class Own(nn.Module):
    """Each weight a parameter; a test changes what it computes."""

    def __init__(self, count=4, inner=24, change=lambda self, h: h, end=lambda self, y: y):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(count, inner, WIDTH))
        self.up = nn.Parameter(torch.randn(count, inner, WIDTH))
        self.down = nn.Parameter(torch.randn(count, WIDTH, inner))
        self.change, self.end = change, end

    def forward(self, x, places, weights):
        gate, up = (torch.einsum("nd,nkfd->nkf", x, w[places]) for w in (self.gate, self.up))
        h = self.change(self, F.silu(gate) * up)
        y = torch.einsum("nkf,nkdf->nkd", h, self.down[places])
        return self.end(self, (y * weights[..., None]).sum(1))


class ForEach(nn.Module):
    """Takes as many rows for each expert, as in Llama 4; without gates."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, WIDTH, 24))
        self.down = nn.Parameter(torch.randn(5, 24, WIDTH))

    def forward(self, x, places, weights):
        x = x.view(len(self.up), -1, WIDTH)
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down).view(-1, WIDTH)


@pytest.mark.parametrize("inner", [24, WIDTH, WIDTH // 2])
def test_gates_and_what_they_multiply_by_in_one_parameter(inner):
    expected = {"gate_up": Placement(1, 2), "down": Placement(2)}
    for loops, ways in ((False, 2), (True, 4)):
        assert placements(Experts(4, WIDTH, inner, loops), ways=ways) == expected
    assert placements(ExpertsInTurns(4, WIDTH, inner)) == {
        "gate_up": Placement(2),
        "gate_up_bias": Placement(1),
        "down": Placement(1),
        "down_bias": None,
    }


def test_parameters_for_each_weight_and_as_many_rows_for_each_expert():
    of_own = {"gate": Placement(1), "up": Placement(1), "down": Placement(2)}
    assert placements(Own()) == of_own
    assert placements(ForEach(), count=5) == {"up": Placement(2), "down": Placement(1)}


def test_the_plan_counts_divided_experts_and_says_why_others_stay_whole():
    plan = plan_layers(MixtureNet("module"), (torch.zeros(2, 8, dtype=torch.long),), {}, 2)
    text = "6 of 8 linear layers and embeddings, and 2 of 2 sets of experts divided, 98%"
    assert text in str(plan)
    # What these weights share their module with has gradients of its own.
    plan = plan_layers(MixtureNet("products"), (torch.zeros(2, 8, dtype=torch.long),), {}, 2)
    assert "and 0 of 2 sets of experts divided" in str(plan)
    reason = "it computes with its experts and with gate.weight"
    assert plan.whole["blocks.0.mixture"] == reason


class WithNorm(Own):
    """Its norm holds a tuple, another one in each block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)


def test_equal_blocks_are_tried_once(monkeypatch):
    tried = []
    plain = experts._try
    monkeypatch.setattr(
        experts, "_try", lambda module, *of: tried.append(module) or plain(module, *of)
    )
    model = nn.Sequential(Routed(WithNorm()), Routed(WithNorm()))
    plan = plan_layers(model, (torch.ones(ROWS, WIDTH),), {}, 2)
    assert {"0.experts", "1.experts"} <= plan.divisions.keys()
    assert len(tried) == 1


def test_a_trial_leaves_the_model_and_random_numbers_as_they_are():
    model, calls = Routed(Own(end=lambda self, y: F.dropout(y, 0.5))), []
    model.experts.register_forward_hook(lambda *_: calls.append(len(_[1][0])))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    assert "experts" in plan_layers(model, (torch.ones(ROWS, WIDTH),), {}, 2).divisions
    assert torch.equal(torch.get_rng_state(), state)
    assert {*calls} <= {ROWS}
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Normed(torch.autograd.Function):
    """The gradient has the length 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


def keeps(self, y):
    self.kept = y
    return y


NOT_A_SUM = "no parts of its experts for 2 ranks add up to what it computes"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"end": lambda self, y: F.layer_norm(y, (WIDTH,))}, NOT_A_SUM),
        ({"end": lambda self, y: y.clamp(-1e3, 1e3)}, NOT_A_SUM),
        ({"end": lambda self, y: y + 1e-2}, NOT_A_SUM),
        ({"change": lambda self, h: h / h.norm(dim=-1, keepdim=True)}, NOT_A_SUM),
        ({"change": lambda self, h: F.dropout(h, 1e-9)}, NOT_A_SUM),
        ({"change": lambda self, h: Normed.apply(h)}, NOT_A_SUM),
        ({"change": lambda self, h: h * (h.shape[-1] / 24)}, NOT_A_SUM),
        ({"end": keeps}, "it keeps results apart from what it returns"),
        ({"end": lambda self, y: (y, y)}, "it returns a tuple, not one tensor"),
        ({"end": lambda self, y: y.view(-1)[: 2 * WIDTH * 10].view(20, -1)}, "a trial of it"),
        ({"end": lambda self, y: y * 0}, "what it returns is zero or not finite"),
        ({"inner": 15}, NOT_A_SUM),
    ],
)
def test_experts_whose_output_is_no_sum_of_parts_stay_whole(options, why):
    assert why in reason(Own(**options))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_blocks_that_differ_in_a_function_of_a_module_inside_are_tried_each():
    def by_module(self, h):
        return self.inside(h)

    model = nn.Sequential(*(Routed(Own(change=by_module)) for _ in range(2)))
    model[0].experts.inside = Apply(torch.tanh)
    model[1].experts.inside = Apply(lambda h: F.normalize(h, dim=-1))
    plan = plan_layers(model, (torch.ones(ROWS, WIDTH),), {}, 2)
    assert "0.experts" in plan.divisions
    assert plan.whole["1.experts"] == NOT_A_SUM


def test_lengths_that_ranks_cannot_divide():
    why = "its weights have no length in common that 5 ranks can divide"
    assert reason(Experts(4, WIDTH), ways=5) == why


def around(m, x, *routes):
    return m.gate(x)


def with_a_penalty(m, x, *routes):
    return m.experts(x, *routes) + m.experts.gate.norm()


def test_experts_that_are_used_otherwise():
    assert reason(Own(), use=with_a_penalty) == "its parameters are also used in norm()"
    assert reason(Own(), use=around) == "the forward does not call it"
    scaled = Own(change=lambda self, h: h * self.scale)
    scaled.scale = nn.Parameter(torch.ones(24))
    assert reason(scaled) == "it computes with its experts and with scale"
    counting = Own()
    counting.register_buffer("counts", torch.zeros(4))
    assert reason(counting) == "it has buffers beside its experts"
    model = nn.Sequential(Routed(Own()), Routed(Own()))
    model[1].experts.up = model[0].experts.up
    plan = plan_layers(model, (torch.ones(ROWS, WIDTH),), {}, 2)
    assert plan.whole["0.experts"] == "it shares a parameter with 1.experts"


def test_inputs_of_experts_stay_whole():
    def use(m, x, *routes):
        return m.experts(m.gate.weight.new_ones(1) * m.first(x), *routes)

    model = Routed(Own(), use=use)
    model.first = nn.Linear(WIDTH, WIDTH)
    plan = plan_layers(model, (torch.ones(ROWS, WIDTH),), {}, 2)
    assert "experts" in plan.divisions
    assert plan.whole["first"] == "experts takes it, which divides its own experts"
