"""Where a search finds what a forward keeps for the script."""

import pytest
import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.side_outputs import SideOutputs


@pytest.mark.parametrize("make", [dict, list])
def test_every_hook_has_a_container_among_its_defaults(make):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    kept = [make() for _ in model]
    for number, (module, own) in enumerate(zip(model, kept, strict=True)):
        # A tuple of defaults is freed when it has been searched, and the next may take its place.
        module.register_forward_hook(lambda m, args, output, number=number: None)

        def keep(m, args, output, own=own):
            own.update(x=output) if make is dict else own.append(output)

        module.register_forward_hook(keep)
    outputs = SideOutputs(model)
    outputs.begin()
    model(torch.ones(2, 3))
    found = outputs.changes().values()
    values = [each.value[0] if each.appended else each.value for each in found]
    assert len(values) == len(model)
    for value, own in zip(values, kept, strict=True):
        assert value is (own["x"] if make is dict else own[0])
