"""Models as people write them, small: nothing in them is made for hvkit."""

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal, with queries, keys and values from one product, as in nanoGPT."""

    def __init__(self, width, heads, dropout, fused=True):
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for each in self.c_attn(x).split(c, dim=2)
        )
        drop = self.dropout if self.training else 0.0
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            mask = torch.tril(torch.ones(t, t, dtype=torch.bool, device=x.device))
            scores = scores.masked_fill(~mask.view(1, 1, t, t), float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), drop) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout, fused):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout, fused)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Returns logits; with targets, logits and the loss."""

    def __init__(
        self, vocab=64, length=16, layers=2, heads=4, width=32, tied=True, dropout=0.0, fused=True
    ):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(width, heads, dropout, fused) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.1)

    def forward(self, ids, targets=None):
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RecomputedGPT(GPT):
    """Computes its blocks a second time in backward, unless ``reentrant`` is None."""

    def __init__(self, reentrant=None, **options):
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, ids):
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.size(1))))
        for block in self.h:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.lm_head(self.ln_f(x))


class Conv1D(nn.Module):
    """A linear layer whose weight has the shape (in, out), as Hugging Face's GPT-2 has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        shape = (*x.size()[:-1], self.outputs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


def gpt_of_conv1d():
    """A GPT whose blocks multiply by ``Conv1D``."""
    model = GPT()
    for block in model.h:
        for parent, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "0")):
            old = getattr(parent, name)
            setattr(parent, name, Conv1D(old.in_features, old.out_features))
        block.mlp[2] = Conv1D(block.mlp[2].in_features, block.mlp[2].out_features)
    return model


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """Rotary positions, fewer keys than queries, SwiGLU; Qwen's norm of each head, if wanted."""

    def __init__(self, width, heads, kv_heads, hidden, head_norm):
        super().__init__()
        self.size = width // heads
        self.groups = heads // kv_heads
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.q_norm = RMSNorm(self.size) if head_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.size) if head_norm else nn.Identity()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def rotate(self, x, cos, sin):
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + turned * sin

    def repeat(self, x):
        b, heads, t, size = x.shape
        x = x[:, :, None, :, :].expand(b, heads, self.groups, t, size)
        return x.reshape(b, heads * self.groups, t, size)

    def forward(self, x, cos, sin):
        shape = (*x.shape[:-1], -1, self.size)
        h = self.input_norm(x)
        q = self.q_norm(self.q_proj(h).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(h).view(shape)).transpose(1, 2)
        v = self.v_proj(h).view(shape).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(
        self, vocab=64, layers=2, heads=8, kv_heads=4, width=32, hidden=48, head_norm=False
    ):
        super().__init__()
        self.size = width // heads
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            LlamaBlock(width, heads, kv_heads, hidden, head_norm) for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        turns = torch.arange(0, self.size, 2, device=ids.device, dtype=x.dtype) / self.size
        angles = torch.outer(
            torch.arange(ids.size(1), device=ids.device, dtype=x.dtype), 1e4**-turns
        )
        angles = torch.cat((angles, angles), dim=-1)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.lm_head(self.norm(x))


class LearntInside(nn.Module):
    """Attention with parameters between its products: for each head, for each of its features."""

    def __init__(self, inputs=20, width=32, heads=4, length=5):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(inputs, 3 * width)
        self.norm = nn.LayerNorm(width // heads)
        self.turn = nn.Parameter(torch.randn(width // heads, width // heads))
        self.positions = nn.Parameter(torch.randn(1, heads, length, length))
        self.scale = nn.Parameter(torch.randn(width))
        self.project = nn.Linear(width, 10)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.norm(q), k @ self.turn
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.positions)
        return self.project(y.transpose(1, 2).flatten(2) * self.scale + self.scale.mean())


class MLP(nn.Sequential):
    def __init__(self, inputs=20, hidden=32, outputs=10):
        super().__init__(
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, outputs),
        )


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` between a projection and a classifier of the mean."""

    def __init__(self, inputs=20, width=32, heads=4, layers=2, outputs=10, dropout=0.0):
        super().__init__()
        self.project = nn.Linear(inputs, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, outputs)

    def forward(self, x, padding=None):
        return self.classify(self.encoder(self.project(x), src_key_padding_mask=padding).mean(1))


class EncoderDecoder(nn.Module):
    """Every layer of the decoder looks at what the encoder returns."""

    def __init__(self, vocab=64, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.Transformer(
            width, 4, layers, layers, 2 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.layers(x, x.flip(1)))


class UNet(nn.Module):
    """What a level returns is used again on the way up, after all levels below it."""

    def __init__(self, width=8, outputs=10):
        super().__init__()
        self.down1, self.down2 = self.level(1, width), self.level(width, 2 * width)
        self.below = self.level(2 * width, 2 * width)
        self.up2, self.up1 = self.level(4 * width, width), self.level(2 * width, width)
        self.classify = nn.Conv2d(width, outputs, 1)

    def level(self, inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.below(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), second], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), first], dim=1))
        return self.classify(x).mean((2, 3))


class CNN(nn.Module):
    def __init__(self, channels=1, outputs=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classify = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))

    def forward(self, x):
        return self.classify(self.features(x).flatten(1))


class ResidualBlock(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels=1, outputs=10):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
        self.fc = nn.Linear(16, outputs)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class SkipNet(nn.Module):
    """A plain net without lists; activations skip over one and over three layers."""

    def __init__(self, inputs=20, width=32, outputs=10):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.third = nn.Linear(width, width)
        self.fourth = nn.Linear(width, width)
        self.last = nn.Linear(2 * width, outputs)

    def forward(self, x):
        start = torch.tanh(self.first(x))
        x = self.norm(start + torch.tanh(self.second(start)))
        x = x + self.fourth(F.gelu(self.third(x)))
        return self.last(torch.cat((x, start), dim=-1))


class PassesTwo(nn.Module):
    """Blocks that pass on two tensors: what they compute, and the start, which the end takes."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, both):
            x, start = both
            return F.relu(self.linear(x).add_(start), inplace=True), start

    def __init__(self, inputs=20, width=32, outputs=10, blocks=5):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(self.Block(width) for _ in range(blocks))
        self.last = nn.Linear(2 * width, outputs)

    def forward(self, x):
        start = self.first(x)
        both = start, start
        for block in self.blocks:
            both = block(both)
        return self.last(torch.cat(both, dim=-1))


class Recurrent(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.first = nn.LSTM(16, 16, batch_first=batch_first)
        self.between = nn.Linear(16, 16)
        self.second = nn.LSTM(16, 16, batch_first=batch_first)
        self.last = nn.Linear(16, 64)

    def forward(self, ids):
        states = [None, None]
        if self.first.batch_first:
            zeros = next(self.parameters()).new_zeros(1, len(ids), 16)
            states = [(zeros, zeros)] * 2
        x, _ = self.first(self.embed(ids), states[0])
        x, _ = self.second(self.between(x), states[1])
        return self.last(x)


class Masked(PassesTwo):
    """Takes a matrix that has nothing to do with the samples."""

    def forward(self, x, matrix):
        return super().forward(x) @ matrix


class Experts(nn.Module):
    """In one parameter of all, gates and what they multiply by one after the other.

    As those of Transformers 5, with a loop over the experts that got tokens, or without.
    """

    def __init__(self, count, width=16, inner=24, loops=False):
        super().__init__()
        self.count, self.loops = count, loops
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, width) * 0.3)
        self.down = nn.Parameter(torch.randn(count, width, inner) * 0.3)

    def forward(self, x, places, weights):
        if not self.loops:
            rows, numbers = x.repeat_interleave(places.size(1), 0), places.reshape(-1)
            gate, up = (self.gate_up[numbers] @ rows[..., None]).chunk(2, dim=1)
            y = (self.down[numbers] @ (F.silu(gate) * up)).squeeze(-1)
            return (y.view(*places.shape, -1) * weights[..., None]).sum(1)
        y = torch.zeros_like(x)
        for number in range(self.count):
            rows, which = torch.where(places == number)
            if rows.numel():
                gate, up = F.linear(x[rows], self.gate_up[number]).chunk(2, dim=-1)
                found = F.linear(F.silu(gate) * up, self.down[number])
                y.index_add_(0, rows, found * weights[rows, which, None])
        return y


class ExpertsInTurns(nn.Module):
    """Transposed, with biases, and gates in turns with what they multiply by, as in GPT-OSS."""

    def __init__(self, count, width=16, inner=24):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, width, 2 * inner) * 0.3)
        self.gate_up_bias = nn.Parameter(torch.randn(count, 2 * inner) * 0.3)
        self.down = nn.Parameter(torch.randn(count, inner, width) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(count, width) * 0.3)

    def forward(self, x, places, weights):
        h = torch.einsum("nd,nkdf->nkf", x, self.gate_up[places]) + self.gate_up_bias[places]
        h = h[..., ::2].sigmoid() * h[..., 1::2].clamp(-7, 7)
        y = torch.einsum("nkf,nkfd->nkd", h, self.down[places]) + self.down_bias[places]
        return (y * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """A mixture of experts, which keeps its auxiliary loss.

    Args:
        experts: "loop" over those that got tokens, or "products" with one parameter of all;
            "module" and "loop in a module" of ``Experts``, "module in turns".
        count: of experts.
        chosen: for each token.
    """

    def __init__(self, width, experts, count, chosen):
        super().__init__()
        self.count, self.chosen, self.loops = count, chosen, experts == "loop"
        self.gate = nn.Linear(width, count, bias=False)
        self.aux = None
        self.apart = "module" in experts
        if experts == "module in turns":
            self.experts = ExpertsInTurns(count, width)
        elif self.apart:
            self.experts = Experts(count, width, loops="loop" in experts)
        elif self.loops:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
                for _ in range(count)
            )
        else:
            self.up = nn.Parameter(torch.randn(count, width, 24) * 0.3)
            self.down = nn.Parameter(torch.randn(count, 24, width) * 0.3)

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.size(-1))
        shares = self.gate(x).softmax(-1)
        weights, places = shares.topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        load = F.one_hot(places, self.count).to(x.dtype).sum(1).mean(0)
        self.aux = self.count * (load * shares.mean(0)).sum()
        if self.apart:
            return self.experts(x, places, weights).reshape(shape)
        if not self.loops:
            found = torch.bmm(F.gelu(x @ self.up), self.down)
            all_weights = torch.zeros_like(shares).scatter(1, places, weights)
            return torch.einsum("end,ne->nd", found, all_weights).reshape(shape)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(places == number)
            if rows.numel():
                y.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        return y.reshape(shape)


class MixtureBlock(nn.Module):
    def __init__(self, width, experts, count, chosen):
        super().__init__()
        self.first, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dense = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.mixture = Mixture(width, experts, count, chosen)

    def forward(self, x):
        x = x + self.dense(self.first(x))
        return x + self.mixture(self.norm(x))


class MixtureNet(nn.Module):
    def __init__(self, experts, count=4, chosen=2, width=16, layers=2):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        blocks = (MixtureBlock(width, experts, count, chosen) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SMALL = functools.partial(GPT, layers=4)
