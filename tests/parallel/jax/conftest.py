import os

os.environ["KERAS_BACKEND"] = "jax"
# Small models run for milliseconds, and compile for seconds. Three ranks compile as users do.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hvkit

hvkit.init("jax")  # before anything makes an array
