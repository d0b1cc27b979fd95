"""Handwritten digits in a Keras Sequential model: compile, fit, evaluate."""

import argparse

import keras
from keras import layers
from sklearn.datasets import load_digits

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--no-shuffle", dest="shuffle", action="store_false")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the trained model, .keras")
args = parser.parse_args()

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
train, test = (images[:1440], labels[:1440]), (images[1440:], labels[1440:])
train = hvkit.shard(train)  # added
test = hvkit.shard(test, exact=True)  # added

keras.utils.set_random_seed(args.seed)
model = keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras.optimizers.SGD(args.lr)
hvkit.distribute(model, optimizer)  # added
model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    *train, batch_size=args.batch_size, epochs=args.epochs, shuffle=args.shuffle, verbose=2
)  # fmt: skip
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"test loss {loss:.6f}, test accuracy {accuracy:.6f}")

args.save = args.save if hvkit.is_main() else None  # added
if args.save:
    model.save(args.save)
