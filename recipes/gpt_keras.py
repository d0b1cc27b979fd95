"""A small GPT in Keras ``fit``: learns to write like the sources of Python, in pipelines."""

import common
import keras
import numpy as np
from keras import layers, ops

import hvkit

WARMUP_STEPS = 20
SAMPLED = 80  # characters


class Embedded(layers.Layer):
    """Indices of characters in, shape (batch, length); their embeddings out, with positions."""

    def __init__(self, characters, flags):
        super().__init__()
        small = keras.initializers.RandomNormal(stddev=0.1)
        self.characters = layers.Embedding(characters, flags.width, small)
        self.positions = layers.Embedding(flags.length, flags.width, small)

    def build(self, shape):
        self.characters.build(shape)
        self.positions.build(shape[1:])

    def call(self, ids):
        return self.characters(ids) + self.positions(ops.arange(ids.shape[1]))


def block(x, flags):
    """A transformer block: causal self-attention and an MLP."""
    attention = layers.MultiHeadAttention(
        flags.heads, flags.width // flags.heads, dropout=flags.dropout
    )
    y = layers.LayerNormalization(epsilon=1e-5)(x)
    y = attention(y, y, use_causal_mask=True)
    x = layers.Add()([x, layers.Dropout(flags.dropout)(y)])
    y = layers.LayerNormalization(epsilon=1e-5)(x)
    y = layers.Dense(4 * flags.width, activation="gelu")(y)
    y = layers.Dense(flags.width)(y)
    return layers.Add()([x, layers.Dropout(flags.dropout)(y)])


def make_model(flags, characters):
    """Indices of characters in, shape (batch, length); logits of the next characters out."""
    ids = keras.Input((flags.length,), dtype="int32")
    x = layers.Dropout(flags.dropout)(Embedded(characters, flags)(ids))
    for _ in range(flags.layers):
        x = block(x, flags)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(ids, layers.Dense(characters, use_bias=False)(x))


def lines_of(numbers, length):
    """Successive lines of a text, and the targets: the same lines one character later."""
    lines = (len(numbers) - 1) // length
    inputs, targets = numbers[: lines * length], numbers[1 : lines * length + 1]
    return inputs.reshape(lines, length), targets.reshape(lines, length)


class Lines(keras.utils.PyDataset):
    """Batches of lines; each pass over the text has another order.

    An epoch of ``fit`` is as many steps as there are between two reports.
    """

    def __init__(self, lines, flags, epoch):
        super().__init__()
        self.lines, self.flags, self.epoch = lines, flags, epoch
        self.in_pass = len(lines[0]) // flags.batch_size

    def on_epoch_end(self):
        self.epoch += 1

    def __len__(self):
        return self.flags.log_interval * common.parts_of_a_batch(self.flags)

    def __getitem__(self, number):
        passed, number = divmod(self.epoch * len(self) + number, self.in_pass)
        order = np.random.default_rng([self.flags.seed, passed]).permutation(len(self.lines[0]))
        batch = order[number * self.flags.batch_size :][: self.flags.batch_size]
        return tuple(each[batch] for each in self.lines)


class ReportLoss(keras.callbacks.Callback):
    """Prints the mean loss of the steps since the last report."""

    def on_epoch_end(self, epoch, logs=None):
        every, steps = self.params["steps"], self.params["epochs"] * self.params["steps"]
        common.say(f"step {(epoch + 1) * every}/{steps}: loss {logs['loss']:.4f}")


def sample(model, prompt):
    """Characters that follow the prompt, which is as long as the model's context.

    All ranks run the model, since each may hold a part of it. All continue from rank 0's draw.
    """
    ids, random = prompt.tolist(), np.random.default_rng(0)
    for _ in range(SAMPLED):
        logits = model.predict_on_batch(np.array([ids[-len(prompt) :]]))[0, -1]
        odds = np.exp(logits - logits.max(), dtype=np.float64)
        ids.append(hvkit.broadcast(int(random.choice(len(odds), p=odds / odds.sum()))))
    return ids[len(prompt) :]


def main():
    flags = common.parse_gpt_flags(__doc__, of_keras=True)
    hvkit.init()
    text = np.frombuffer(common.load_text().encode("ascii"), np.uint8)
    characters, numbers = np.unique(text, return_inverse=True)
    numbers = numbers.astype(np.int32)
    train_text, test_text = numbers[: len(numbers) * 19 // 20], numbers[len(numbers) * 19 // 20 :]

    # Each rank draws its own dropout; distribute copies rank 0's weights to all ranks.
    keras.utils.set_random_seed(flags.seed + hvkit.rank())
    model = make_model(flags, len(characters))
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, max(flags.steps - WARMUP_STEPS, 1), warmup_target=flags.lr, warmup_steps=WARMUP_STEPS
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=1.0)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        mesh=flags.mesh,
        microbatches=flags.microbatches,
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    first_epoch, saving = 0, []
    if flags.checkpoint_dir is not None:
        checkpoint = hvkit.Checkpoint(
            flags.checkpoint_dir, keep=flags.keep, model=model, optimizer=optimizer
        )
        first_epoch = checkpoint.restore().epoch
        saving = [checkpoint.callback()]

    counts = np.bincount(train_text, minlength=len(characters)) + 1  # none is zero
    loss_of_frequencies = -np.log(counts / counts.sum())[test_text].mean()
    common.say(f"{len(train_text)} characters of text, {len(test_text)} held out")
    common.say(f"{common.parts_of_a_batch(flags)} x {flags.batch_size} lines a step")
    common.say(f"held-out loss of each character's frequency: {loss_of_frequencies:.4f}")

    lines = Lines(lines_of(train_text, flags.length), flags, first_epoch)
    model.fit(
        hvkit.shard(lines, mesh=flags.mesh),
        shuffle=False,
        epochs=flags.steps // flags.log_interval,
        initial_epoch=first_epoch,
        callbacks=[ReportLoss(), *saving],
        verbose=0,
    )
    held_out = hvkit.shard(lines_of(test_text, flags.length), exact=True, mesh=flags.mesh)
    loss = model.evaluate(*held_out, batch_size=flags.test_batch_size, verbose=0)
    common.say(f"held-out loss {loss:.4f}")
    line = sample(model, test_text[: flags.length])
    common.say(f"sampled: {bytes(characters[line].tolist()).decode()!r}")


if __name__ == "__main__":
    main()
