"""Models divided between two ranks that share a GPU, beside one process."""

import copy
import json
import os

import gpu_steps
import torch
from torch import nn
from torch.nn import functional as F

TWO_STAGES = {"microbatches": 4}


def gpt():
    return gpu_steps.GPT(tokens=512, width=128, heads=4, blocks=4, length=64)


def convnet():
    """Group norm, which does not depend on how a batch is divided."""
    layers = []
    for before, after in ((3, 16), (16, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def of_text(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(512, (12, 16, 65), generator=generator).to(device)
    return [(batch[:, :-1], batch[:, 1:]) for batch in x]


def of_images(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 16, 3, 16, 16, generator=generator).to(device)
    return list(zip(x, torch.randint(10, (12, 16), generator=generator).to(device), strict=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def fused(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, fused=True)


def train(model, optimizer, data, dtype=None, scaler=None):
    """Steps as a user writes them; the losses."""
    losses = []
    kind = data[0][0].device.type
    scaler = torch.amp.GradScaler(kind, init_scale=256.0, enabled=scaler is not None)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(x)
            loss = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


# By case: model, data, optimizer, arguments of ``train``, axes and arguments of ``distribute``, and
# how far weights may be from those of one process, relative to the largest of each tensor.
CASES = {
    "GPT, GPipe": (gpt, of_text, sgd, {}, {"pipeline": 2}, TWO_STAGES, 2e-3),
    "GPT, GPipe, bfloat16": (
        gpt,
        of_text,
        sgd,
        {"dtype": torch.bfloat16},
        {"pipeline": 2},
        TWO_STAGES,
        5e-2,
    ),
    "GPT, GPipe, fused SGD, float16, GradScaler": (
        gpt,
        of_text,
        fused,
        {"dtype": torch.float16, "scaler": True},
        {"pipeline": 2},
        TWO_STAGES,
        5e-2,
    ),
    "convolutions in place, GPipe": (
        convnet,
        of_images,
        sgd,
        {},
        {"pipeline": 2},
        TWO_STAGES,
        2e-2,
    ),
    "GPT, tensor": (gpt, of_text, sgd, {}, {"tensor": 2}, {}, 2e-3),
    "GPT, tensor, bfloat16": (
        gpt,
        of_text,
        sgd,
        {"dtype": torch.bfloat16},
        {"tensor": 2},
        {},
        5e-2,
    ),
}


def compare(device, names):
    """Print each case's largest difference from one process, and the bytes that a rank holds."""
    import hvkit

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name, (make, data_of, optimizer, how, axes, options, within) in CASES.items():
        if names and name not in names:
            continue
        line = {"case": name, "within": within}
        try:
            torch.manual_seed(0)
            reference = make().to(device)
            model = copy.deepcopy(reference).cpu()
            data = data_of(device)
            losses = train(reference, optimizer(reference.parameters()), data, **how)
            own = optimizer(model.to(device).parameters())
            model, own = hvkit.distribute(model, own, mesh=hvkit.Mesh(**axes), **options)
            found = train(model, own, data, **how)
            held = sum(p.nbytes for p in model.parameters() if not p.is_meta)
            line["held"] = held / sum(p.nbytes for p in reference.parameters())
            line["loss apart"] = max(abs(a - b) for a, b in zip(losses, found, strict=True))
            with hvkit.settled(model, own):
                if hvkit.rank() == 0:
                    state = {n: t.to(device) for n, t in model.state_dict().items()}
                    line["difference"] = max(
                        float((state[n] - t).abs().max() / t.abs().max().clamp(min=1e-30))
                        for n, t in reference.state_dict().items()
                    )
                    line["right"] = line["difference"] <= within and line["held"] < 0.75
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:900]
            line["right"] = False
        if hvkit.rank() == 0 or "error" in line:
            print(json.dumps(line), flush=True)
        if "error" in line:
            os._exit(1)
