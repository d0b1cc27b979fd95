"""Source of the names that a page's fragments use without defining them; runs before each."""

PYTORCH = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvkit

seed, epochs = 1, 2
torch.manual_seed(seed)  # The ranks must hold the same data.
train_set = data = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
test_set = TensorDataset(torch.randn(50, 8), torch.randint(0, 4, (50,)))
loader = DataLoader(train_set, batch_size=64)
test_loader = DataLoader(test_set, batch_size=10)
correct, loss, samples, accuracy = 3, 0.5, 10, 0.25


def Net():
    return nn.Linear(8, 4)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def download(folder):
    return data


def out_of_time():
    return False
"""

KERAS = """
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import tensorflow as tf

images = x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
labels = y = np.random.default_rng(1).integers(0, 4, 256)


def build_model():
    return keras.Sequential([keras.layers.Dense(4, activation="softmax")])


keras_model = build_model()
keras_optimizer = keras.optimizers.SGD(0.1)
"""

GAN = """
generator, discriminator = (keras.Sequential([keras.layers.Dense(8)]) for _ in range(2))
g_optimizer, d_optimizer = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)


class GAN(keras.Model):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def compile(self, g_optimizer, d_optimizer):
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

    def train_step(self, data):
        images, _ = data
        with tf.GradientTape(persistent=True) as tape:
            d_loss = tf.reduce_mean(self.discriminator(images))
            g_loss = tf.reduce_mean(self.discriminator(self.generator(images)))
        for part, optimizer, loss in (
            (self.generator, self.g_optimizer, g_loss),
            (self.discriminator, self.d_optimizer, d_loss),
        ):
            variables = part.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}
"""

STRATEGIES = (
    "centralized",
    "decoupled-momentum",
    "diloco",
    "elastic-averaging",
    "fully-shard",
    "gossip",
    "local-sgd",
    "parameter-server",
    "sharded-optimizer",
    "synchronous",
)
TRAIN_STEP = """


def train_step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
DEEP_NET = """
class Block(nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        self.aux = x.square().mean()
        return x


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*[Block(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])

    @property
    def blocks(self):
        return list(self)


model = Net()
optimizer = torch.optim.AdamW(model.parameters())


def layers_of(model):
    return list(model)


steps = 4
"""

JAX = """
import types

import jax
import numpy as np
import optax
from flax import nnx

import hvkit

hvkit.init("jax")

images = x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
labels = y = np.random.default_rng(1).integers(0, 4, 256)
batches = [(images, labels)] * 2


def Net(rngs):
    return nnx.Linear(8, 4, rngs=rngs)


def loss_of(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: loss_of(model(x), y))(model)
    optimizer.update(model, gradients)
    return loss


params = {"w": jax.numpy.ones((8, 4))}
opt_state = optax.sgd(0.1).init(params)


def step(params, opt_state, x, y):
    return params, opt_state, loss_of(x @ params["w"], y)


"""

LIGHTNING = """
import os

import lightning as L

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


module = Module()
train_loader, val_loader = DataLoader(train_set, 16, shuffle=True), test_loader
"""

TRANSFORMERS = """
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer


def gpt():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0,
            eos_token_id=0,
        )
    )


model, causal_model = gpt(), gpt()
rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 8, (40, 16))]
train_set, eval_set = rows[:32], rows[32:]
args = TrainingArguments(
    "runs/trainer", use_cpu=True, num_train_epochs=1, report_to="none", save_strategy="no"
)
words = {"<end>": 0, "a": 1, "b": 2}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="b")),
    eos_token="<end>", pad_token="<end>",
)
texts = Dataset.from_dict({"text": ["a", "b", "a"] * 4})
"""

ACCELERATE = """
from accelerate import Accelerator, DataLoaderConfiguration

"""

PRELUDES = {
    "docs/jax.md": JAX,
    "README.md": PYTORCH + KERAS,
    "docs/index.md": PYTORCH,
    "docs/tutorial.md": "",
    "docs/notebooks.md": "",
    "docs/from-spark.md": "",
    "docs/script.md": PYTORCH + KERAS,
    "docs/unusual-scripts.md": PYTORCH
    + KERAS
    + GAN
    + """
loader = hvkit.shard(loader)
model, optimizer = hvkit.distribute(model, optimizer)
""",
    "docs/data.md": PYTORCH,
    "docs/strategies.md": PYTORCH
    + """
def evaluate(model):
    return 12


""",
    "docs/compression.md": PYTORCH,
    "docs/mixed-precision.md": PYTORCH
    + KERAS
    + """
model, optimizer = hvkit.distribute(model, optimizer)
""",
    **{f"docs/strategies/{page}.md": PYTORCH for page in STRATEGIES},
    "docs/checkpoints.md": PYTORCH
    + KERAS
    + """
loader = hvkit.shard(loader)
test_loader = hvkit.shard(test_loader, exact=True)
model, optimizer = hvkit.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
early_stopping = hvkit.EarlyStopping(patience=5)
train, validation = hvkit.shard((x, y)), hvkit.shard((x, y), exact=True)
train = tf.data.Dataset.from_tensor_slices(train).batch(32)
keras_model, keras_optimizer = hvkit.distribute(keras_model, keras_optimizer)
keras_model.compile(optimizer=keras_optimizer, loss="sparse_categorical_crossentropy")
"""
    + TRAIN_STEP
    + """

def evaluate(model, loader):
    return 0.5, len(loader.dataset)
""",
    "docs/restarts.md": PYTORCH
    + """
loader = hvkit.shard(loader)
model, optimizer = hvkit.distribute(model, optimizer)
"""
    + TRAIN_STEP,
    "docs/monitoring.md": PYTORCH + KERAS,
    **{
        f"docs/{page}.md": PYTORCH + KERAS + DEEP_NET
        for page in ("meshes", "meshes/pipelines", "meshes/tensor", "from-deepspeed")
    },
    "docs/from-horovod.md": PYTORCH,
    "docs/from-ddp.md": PYTORCH
    + KERAS
    + """
dataset = tf.data.Dataset.from_tensor_slices((x, np.eye(4)[y]))
""",
    "docs/lightning.md": PYTORCH + LIGHTNING,
    "docs/transformers.md": PYTORCH + TRANSFORMERS,
    "docs/accelerate.md": PYTORCH + ACCELERATE,
}
