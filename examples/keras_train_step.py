"""An autoencoder of handwritten digits in Keras, with a train_step of its own."""

import argparse

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the trained weights, .weights.h5")
args = parser.parse_args()


class Autoencoder(keras.Model):
    """Images of 64 values to 8 values and back."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(32, "tanh"), layers.Dense(8, "tanh")])
        self.decoder = keras.Sequential([layers.Dense(32, "tanh"), layers.Dense(64)])
        self.error = keras.metrics.Mean(name="error")

    def call(self, images):
        return self.decoder(self.encoder(images))

    def train_step(self, images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(images, training=True) - images) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.error.update_state(loss)
        return {"error": self.error.result()}


images = load_digits().data.astype("float32") / 16
data = tf.data.Dataset.from_tensor_slices(images[:1440])
data = data.shuffle(1440, seed=args.seed).batch(args.batch_size)
data = hvkit.shard(data)  # added

keras.utils.set_random_seed(args.seed)
model = Autoencoder()
optimizer = keras.optimizers.SGD(args.lr)
hvkit.distribute(model, optimizer)  # added
model.compile(optimizer)
model.fit(data, epochs=args.epochs, verbose=2)

args.save = args.save if hvkit.is_main() else None  # added
if args.save:
    model.save_weights(args.save)
