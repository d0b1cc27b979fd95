"""A small GPT in PyTorch: learns to write like the sources of Python, on any mesh."""

import common
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvkit

WARMUP_STEPS = 20
SAMPLED = 80  # characters

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Attention(nn.Module):
    """Causal self-attention: shape (batch, length, width) in and out."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Indices of characters in, shape (batch, length); logits of the next characters out."""

    def __init__(self, flags, characters):
        super().__init__()
        self.characters = nn.Embedding(characters, flags.width)
        self.positions = nn.Embedding(flags.length, flags.width)
        self.dropout = nn.Dropout(flags.dropout)
        self.blocks = nn.Sequential(
            *(Block(flags.width, flags.heads, flags.dropout) for _ in range(flags.layers))
        )
        self.norm = nn.LayerNorm(flags.width)
        self.head = nn.Linear(flags.width, characters, bias=False)
        self.head.weight = self.characters.weight
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.1)  # with PyTorch's 1 the head has large logits

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.characters(ids) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))


def lines_of(numbers, length):
    """Successive lines of a text, and the targets: the same lines one character later."""
    lines = (len(numbers) - 1) // length
    inputs, targets = numbers[: lines * length], numbers[1 : lines * length + 1]
    return TensorDataset(inputs.view(lines, length), targets.view(lines, length))


def batches_without_end(loader):
    while True:
        yield from loader


def rate_factor(step, steps):
    """The learning rate rises over the first steps, and falls as a cosine."""
    return min(1, (step + 1) / WARMUP_STEPS) * common.rate_factor("cosine", step, steps)


@torch.no_grad()
def evaluate(model, batches):
    """Mean loss on the held-out text; each rank or pipeline computes its own part of it."""
    model.eval()
    loss_sum = characters = 0
    for ids, targets in batches:
        logits, targets = model(ids.to(device)), targets.to(device)
        loss_sum += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        characters += targets.numel()
    return hvkit.mean(loss_sum, characters)


@torch.no_grad()
def sample(model, prompt):
    """Characters that follow the prompt, which is as long as the model's context.

    All ranks run the model, since each may hold a part of it. All continue from rank 0's draw.
    """
    model.eval()
    ids = prompt.tolist()
    for _ in range(SAMPLED):
        context = torch.tensor([ids[-len(prompt) :]], device=device)
        probabilities = model(context)[0, -1].float().softmax(0)
        ids.append(hvkit.broadcast(torch.multinomial(probabilities, 1).item()))
    return ids[len(prompt) :]


def main():
    flags = common.parse_gpt_flags(__doc__)
    hvkit.init()
    text = bytearray(common.load_text(), "ascii")
    characters, numbers = torch.frombuffer(text, dtype=torch.uint8).unique(return_inverse=True)
    train_text, test_text = numbers[: len(numbers) * 19 // 20], numbers[len(numbers) * 19 // 20 :]
    train_loader = hvkit.shard(
        DataLoader(
            lines_of(train_text, flags.length), flags.batch_size, shuffle=True, drop_last=True
        ),
        seed=flags.seed,
        mesh=flags.mesh,
    )
    test_loader = hvkit.shard(
        DataLoader(lines_of(test_text, flags.length), flags.test_batch_size),
        exact=True,
        mesh=flags.mesh,
    )

    # Each rank draws its own dropout; distribute makes the weights from rank 0's seed. Until then
    # the model has shapes only, so a rank of a pipeline never holds more than its part.
    torch.manual_seed(flags.seed + hvkit.rank())
    with hvkit.deferred_init():
        model = GPT(flags, len(characters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, weight_decay=0.1)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        mesh=flags.mesh,
        microbatches=flags.microbatches,
        schedule=flags.schedule,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, flags.steps)
    )

    steps_done, checkpoint = 0, None
    if flags.checkpoint_dir is not None:
        checkpoint = hvkit.Checkpoint(
            flags.checkpoint_dir,
            keep=flags.keep,
            model=model,
            optimizer=optimizer,
            scheduler=schedule,
            data=train_loader,
        )
        steps_done = checkpoint.restore().step

    counts = train_text.bincount(minlength=len(characters)) + 1  # none is zero
    loss_of_frequencies = -(counts / counts.sum()).log()[test_text].mean()
    common.say(f"{len(train_text)} characters of text, {len(test_text)} held out")
    common.say(f"{common.parts_of_a_batch(flags)} x {flags.batch_size} lines a step")
    common.say(f"held-out loss of each character's frequency: {loss_of_frequencies:.4f}")

    model.train()
    steps = range(steps_done + 1, flags.steps + 1)
    for step, (ids, targets) in zip(steps, batches_without_end(train_loader), strict=False):
        optimizer.zero_grad()
        logits = model(ids.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % flags.log_interval == 0 or step == flags.steps:
            mean = hvkit.average(loss.item())
            common.say(f"step {step}/{flags.steps}: loss {mean:.4f}")
        if checkpoint is not None and (step % flags.save_every == 0 or step == flags.steps):
            checkpoint.save(epoch=step // len(train_loader), step=step)

    with hvkit.settled(model):
        common.say(f"held-out loss {evaluate(model, test_loader):.4f}")
        line = sample(model, test_text[: flags.length])
    common.say(f"sampled: {bytes(characters[line].tolist()).decode()!r}")


if __name__ == "__main__":
    main()
