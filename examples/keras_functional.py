"""Handwritten digits in a functional Keras model: two branches, tf.data, callbacks."""

import argparse

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the best model, .keras")
args = parser.parse_args()

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
train = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
train = train.shuffle(1440, seed=args.seed).batch(args.batch_size).prefetch(2)
validation = tf.data.Dataset.from_tensor_slices((images[1440:], labels[1440:])).batch(100)
train = hvkit.shard(train)  # added
validation = hvkit.shard(validation, exact=True)  # added

keras.utils.set_random_seed(args.seed)
inputs = keras.Input((8, 8, 1))
texture = layers.Flatten()(layers.Conv2D(8, 3, activation="relu")(inputs))
shape = layers.Dense(32, activation="relu")(layers.Flatten()(inputs))
outputs = layers.Dense(10)(layers.Concatenate()([texture, shape]))
model = keras.Model(inputs, outputs)
optimizer = keras.optimizers.SGD(args.lr)
hvkit.distribute(model, optimizer)  # added
model.compile(
    optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
]
if args.save:
    callbacks.append(
        keras.callbacks.ModelCheckpoint(args.save, monitor="val_loss", save_best_only=True)
    )
model.fit(train, validation_data=validation, epochs=args.epochs, callbacks=callbacks, verbose=2)
