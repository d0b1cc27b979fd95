import os

os.environ["KERAS_BACKEND"] = "jax"

import hvkit

hvkit.init("jax")  # before anything makes an array
