"""Which frameworks there are, their ports, and how their models and tensors are recognised.

Nothing here imports a framework: a model can only be of one that the script has imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from packaging.version import Version

from hvkit.errors import HvkitError

_KERAS_ON_JAX = Version("3.12")


@dataclass(frozen=True)
class Framework:
    """A framework, or Keras on one of its backends."""

    name: str  # as in messages
    package: str  # of its models: ``"torch"``, ``"keras"`` or ``"jax"``
    # Whose tensors are sent, of ``"torch"``, ``"tensorflow"`` or ``"jax"``; None without a port.
    engine: str | None
    port: str = ""  # the module and class of its port
    pipeline_port: str = ""  # the same for models that a pipeline divides, if that is another
    mesh_port: str = ""  # the same for any mesh
    takes_pytrees: bool = False  # a list may be one model; ``distribute`` returns a new object
    updates: str = ""  # the module whose ``watch_updates`` warns of optimizers that nobody passed

    def port_for(self, models: Sequence[Any], optimizers: Sequence[Any], options: Any) -> Any:
        """Make the port, an ``hvkit.sync.port.Port``, for ``options`` of ``distribute``."""
        in_mesh = options.mesh and (
            self.mesh_port or (options.mesh.mesh.pipeline > 1 and self.pipeline_port)
        )
        module, name = (in_mesh or self.port).split(":")
        return getattr(import_module(module), name)(models, optimizers, options)


_HERE = "hvkit.frameworks"
PYTORCH = Framework(
    "PyTorch",
    "torch",
    "torch",
    f"{_HERE}.pytorch.port:PyTorchPort",
    mesh_port=f"{_HERE}.pytorch.model_parallel.port:MeshPort",
    updates=f"{_HERE}.pytorch.port",
)
KERAS_ON_TENSORFLOW = Framework(
    "Keras on TensorFlow",
    "keras",
    "tensorflow",
    f"{_HERE}.keras.on_tensorflow:KerasOnTensorFlowPort",
    pipeline_port=f"{_HERE}.keras.pipeline.tensorflow_pipeline:KerasMeshPort",
    updates=f"{_HERE}.keras.refusals",
)
KERAS_ON_PYTORCH = Framework(
    "Keras on PyTorch",
    "keras",
    "torch",
    f"{_HERE}.keras.on_pytorch:KerasOnPyTorchPort",
    pipeline_port=f"{_HERE}.keras.pipeline.pytorch_pipeline:KerasOnPyTorchMeshPort",
    updates=f"{_HERE}.keras.refusals",
)
KERAS_IN_PYTORCH_LOOP = Framework(
    "Keras in a loop with optimizers of PyTorch",
    "keras",
    "torch",
    f"{_HERE}.keras.on_pytorch:KerasLoopPort",
    pipeline_port=KERAS_ON_PYTORCH.pipeline_port,
)
KERAS_ON_JAX = Framework(
    "Keras on JAX",
    "keras",
    "jax",
    f"{_HERE}.keras.on_jax:KerasOnJaxPort",
    updates=f"{_HERE}.keras.jax_refusals",
)
JAX = Framework("JAX", "jax", "jax", f"{_HERE}.jax.port:JaxPort", takes_pytrees=True)
_OTHER_KERAS = Framework("Keras", "keras", None)

_KERAS = {each.engine: each for each in (KERAS_ON_TENSORFLOW, KERAS_ON_PYTORCH, KERAS_ON_JAX)}


def framework_of(model: object) -> Framework | None:
    """The framework of a model, for JAX also of any pytree with an array of it; else None."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):  # on PyTorch also one of its modules
        return keras_framework()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return PYTORCH
    jax, nnx = sys.modules.get("jax"), sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        return JAX
    # TensorFlow looks for JAX, and may find a folder of that name.
    if jax is None or not hasattr(jax, "tree"):
        return None
    return JAX if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model)) else None


def keras_framework() -> Framework:
    return _KERAS.get(sys.modules["keras"].backend.backend(), _OTHER_KERAS)


def framework_of_all(models: Sequence[Any], optimizers: Sequence[Any]) -> Framework:
    found = [framework_of(model) or _refuse(model) for model in models]
    if len(set(found)) > 1:
        classes = ", ".join(f"{type(m).__module__}.{type(m).__qualname__}" for m in models)
        raise TypeError(f"models of one call must be of one framework, got {classes}")
    if found[0] is KERAS_ON_PYTORCH and are_of_pytorch(optimizers):
        return KERAS_IN_PYTORCH_LOOP
    if found[0] is KERAS_ON_JAX and Version(v := str(sys.modules["keras"].__version__)) < (
        _KERAS_ON_JAX
    ):
        raise HvkitError(
            f"on JAX hvkit needs Keras {_KERAS_ON_JAX} or newer, whose steps take arrays of "
            f"all ranks from any data, and Keras {v} is installed: upgrade it"
        )
    if found[0] is _OTHER_KERAS:
        raise ValueError(
            f"Keras runs on the {sys.modules['keras'].backend.backend()!r} backend, for which "
            f"hvkit has no port: set KERAS_BACKEND to {' or '.join(map(str, _KERAS))} before Keras "
            "is imported"
        )
    return found[0]


def gather_module(package: str) -> Any:
    """The module with the script's calls on tensors of ``"torch"`` or ``"tensorflow"``."""
    folder = {"torch": "pytorch", "tensorflow": "keras.tensorflow"}[package]
    return import_module(f"{_HERE}.{folder}.gather")


_TENSORS = {"torch": ("Tensor",), "tensorflow": ("Tensor", "Variable"), "jax": ("Array",)}


def tensor_in(value: Any) -> tuple[str, Any]:
    """The package of a tensor, also in a variable of Keras, and the tensor; "" for other values."""
    # keras.Variable itself is a subclass of the class of weights in Keras 3.5.
    keras = sys.modules.get("keras.src.backend")
    if keras is not None and isinstance(value, keras.Variable):
        value = value.value
    for package, names in _TENSORS.items():
        # TensorFlow looks for JAX, and may find a folder of that name.
        module = sys.modules.get(package)
        if any(isinstance(value, getattr(module, name, ())) for name in names):
            return package, value
    return "", value


script_calls = 0  # how often the script has called a function of hvkit that a loss may contain


def note_script_call() -> None:
    """Count such a call, which all ranks must make."""
    global script_calls
    script_calls += 1


def in_graph(call: str, *values: Any) -> bool:
    """Count the user's call; whether TensorFlow is tracing a graph with one of these tensors."""
    note_script_call()
    jax, tf = map(sys.modules.get, ("jax", "tensorflow"))
    # TensorFlow looks for JAX, and may find a folder of that name.
    tracer = getattr(getattr(jax, "core", None), "Tracer", ())
    if any(isinstance(v, tracer) for v in values):
        raise TypeError(
            f"{call} needs the values of an array, which has none inside a compiled function of "
            "JAX, where arrays belong to all ranks, as do sums and means of them: leave the call "
            "out there, or make it outside, on the function's result"
        )
    if tf is None or not hasattr(tf, "executing_eagerly") or tf.executing_eagerly():
        return False
    return any(tensor_in(value)[0] == "tensorflow" for value in values)


def are_of_pytorch(optimizers: Sequence[Any]) -> bool:
    """Whether all are optimizers of PyTorch, which a Keras model may have in a loop."""
    torch = sys.modules.get("torch")
    return torch is not None and all(isinstance(o, torch.optim.Optimizer) for o in optimizers)


def watch_updates() -> None:
    """Warn of updates of models that ``distribute`` did not get; in JAX only under Keras."""
    imported = [PYTORCH] if "torch" in sys.modules else []
    imported += [keras_framework()] if "keras" in sys.modules else []
    for each in imported:
        if each.updates:
            import_module(each.updates).watch_updates()


def _refuse(model: Any) -> NoReturn:
    name, hint = f"{type(model).__module__}.{type(model).__qualname__}", ""
    if name.startswith("tf_keras"):
        hint = " (tf_keras is Keras 2; unset TF_USE_LEGACY_KERAS and use Keras 3)"
    elif isinstance(model, Mapping) and "jax" in sys.modules:
        hint = ": make arrays of NumPy those of JAX, jax.tree.map(jax.numpy.asarray, params)"
    elif isinstance(model, Mapping):
        hint = ": pass list(models.values())"
    elif name in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        hint = (
            ": a parameter that belongs to no module needs only its optimizer, beside that of a "
            "model: hvkit.distribute(actor, [actor_optimizer, alpha_optimizer])"
        )
    raise TypeError(
        "model must be a torch.nn.Module, a keras.Model or an nnx.Module, or a list of them, or a "
        f"pytree with arrays of JAX, got {name}{hint}"
    )
