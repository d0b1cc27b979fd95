"""Bytes that a compiled step of a small GPT in Flax NNX takes on each rank, in a mesh.

hvkit run -np 2 bench/jax_memory.py whole
hvkit run -np 2 bench/jax_memory.py tensor
hvkit run -np 2 bench/jax_memory.py shard
hvkit run -np 4 bench/jax_memory.py both
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hvkit

hvkit.init("jax")
WIDTH, HEADS, BLOCKS, TOKENS, LENGTH, BATCH = 256, 8, 4, 512, 128, 8
MESHES = {
    "whole": None,
    "tensor": hvkit.Mesh(1, tensor=-1),
    "shard": hvkit.Mesh(1, shard=-1),
    "both": hvkit.Mesh(1, tensor=2, shard=-1),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


mesh = MESHES[sys.argv[1]]
model = GPT(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
hvkit.distribute(model, optimizer, mesh=mesh)
lines = np.random.default_rng(0).integers(TOKENS, size=(BATCH, LENGTH + 1), dtype=np.int32)
batch = hvkit.batch(hvkit.shard(lines, mesh=mesh))
structure, state = nnx.split((model, optimizer))


@jax.jit
def step(state, batch):
    model, optimizer = nnx.merge(structure, state)

    def loss_of(model):
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), loss


found = step.lower(state, batch).compile().memory_analysis()
if hvkit.is_main():
    print(
        f"{sys.argv[1]}: {found.argument_size_in_bytes / 1e6:.1f} MB of weights and state, "
        f"{found.temp_size_in_bytes / 1e6:.1f} MB of temporary arrays"
    )
