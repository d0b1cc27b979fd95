"""A causal language model of KerasHub, fine-tuned with LoRA in Keras's fit."""

import argparse

import keras
import keras_hub
import numpy as np

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--rank", type=int, default=4, help="of LoRA's matrices")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for LoRA's trained weights, .lora.h5")
args = parser.parse_args()

# Sequences that count up in steps of 1, 2 or 3, from 0 to 31 and round again.
VOCABULARY, LENGTH = 32, 16
random = np.random.default_rng(args.seed)
starts, steps = random.integers(VOCABULARY, size=(720, 1)), random.integers(1, 4, size=(720, 1))
tokens = (starts + steps * np.arange(LENGTH + 1)) % VOCABULARY
x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((len(tokens), LENGTH), "int32")}
y = tokens[:, 1:]
x, y = hvkit.shard((x, y))  # added

keras.utils.set_random_seed(args.seed)
# With pretrained weights: keras_hub.models.Llama3CausalLM.from_preset("llama3.2_1b").
backbone = keras_hub.models.Llama3Backbone(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=32,
    intermediate_dim=64,
)
backbone.enable_lora(rank=args.rank)
model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
optimizer = keras.optimizers.AdamW(args.lr)
hvkit.distribute(model, optimizer)  # added
model.compile(optimizer)
# It reads arrays in their order: KerasHub never shuffles them.
model.fit(
    x, y, batch_size=args.batch_size, epochs=args.epochs, shuffle=False, verbose=2
)  # fmt: skip

args.save = args.save if hvkit.is_main() else None  # added
if args.save:
    backbone.save_lora_weights(args.save)
