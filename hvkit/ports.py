"""Which port serves the models of a call: PyTorch's, Keras's on each backend, or JAX's."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from packaging.version import Version

from hvkit.errors import HvkitError
from hvkit.sync.port import (
    KERAS_BACKENDS,
    Options,
    Port,
    are_of_pytorch,
    engine_of,
    framework_of,
)

_KERAS_ON_JAX = Version("3.12")


def framework_of_all(models: Sequence[Any]) -> str:
    """``"torch"``, ``"keras"`` or ``"jax"``.

    Raises:
        TypeError: one is no model, or they are of several.
    """
    frameworks = [framework_of(model) or _refuse(model) for model in models]
    if len(set(frameworks)) > 1:
        kinds = ", ".join(f"{type(m).__module__}.{type(m).__qualname__}" for m in models)
        raise TypeError(f"models of one call must be of one framework, got {kinds}")
    return frameworks[0]


def port_for(
    framework: str, models: Sequence[Any], optimizers: Sequence[Any], options: Options
) -> Port:
    """Make the port for models of PyTorch, Keras or JAX; imports no other framework.

    Raises:
        TypeError: an optimizer belongs to another framework.
        ValueError: an argument has a wrong value.
    """
    if framework == "keras":
        return _port_for_keras(models, optimizers, options)
    if framework == "jax":
        from hvkit.frameworks.jax import JaxPort

        return JaxPort(models[0], optimizers[0], options)
    if options.mesh:
        from hvkit.frameworks.pytorch.model_parallel.port import MeshPort

        return MeshPort(models, optimizers, options)
    from hvkit.frameworks.pytorch import PyTorchPort

    return PyTorchPort(models, optimizers, options)


def watch_updates() -> None:
    """Warn of updates of models that nobody passes to ``distribute``, where a framework shows them.

    JAX shows those of Keras only.
    """
    if "torch" in sys.modules:
        from hvkit.frameworks.pytorch.port import is_distributed_parameter
        from hvkit.frameworks.pytorch.step_hooks import watch_steps

        watch_steps(is_distributed_parameter)
    if "keras" in sys.modules:
        engine = engine_of("keras")
        if engine == "jax":
            from hvkit.frameworks.keras import jax_refusals

            jax_refusals.watch_updates()
        elif engine is not None:
            from hvkit.frameworks.keras import refusals

            refusals.watch_updates()


def _port_for_keras(models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> Port:
    """Make the port for the backend that Keras runs on.

    Raises:
        HvkitError: Keras is too old for it.
        ValueError: there is none.
    """
    engine, in_pipeline = engine_of("keras"), False
    if options.mesh and engine != "jax":
        from hvkit.frameworks.keras.pipeline.refusals import refuse_axes

        refuse_axes(options.mesh.mesh)
        in_pipeline = options.mesh.mesh.pipeline > 1
    if engine == "tensorflow":
        if in_pipeline:
            from hvkit.frameworks.keras.pipeline.tensorflow_pipeline import KerasMeshPort

            return KerasMeshPort(models, optimizers, options)
        from hvkit.frameworks.keras.port import KerasPort

        return KerasPort(models, optimizers, options)
    if engine == "torch":
        if in_pipeline:
            from hvkit.frameworks.keras.pipeline.pytorch_pipeline import KerasOnPyTorchMeshPort

            return KerasOnPyTorchMeshPort(models, optimizers, options)
        if are_of_pytorch(optimizers):
            from hvkit.frameworks.keras.pytorch_loop import KerasLoopPort

            return KerasLoopPort(models, optimizers, options)
        from hvkit.frameworks.keras.on_pytorch import KerasOnPyTorchPort

        return KerasOnPyTorchPort(models, optimizers, options)
    if engine == "jax":
        if Version(version := str(sys.modules["keras"].__version__)) < _KERAS_ON_JAX:
            raise HvkitError(
                f"on JAX hvkit needs Keras {_KERAS_ON_JAX} or newer, whose steps take arrays of "
                f"all ranks from any data, and Keras {version} is installed: upgrade it"
            )
        from hvkit.frameworks.keras.on_jax import KerasOnJaxPort

        return KerasOnJaxPort(models, optimizers, options)
    backend = sys.modules["keras"].backend.backend()
    raise ValueError(
        f"Keras runs on the {backend!r} backend, for which hvkit has no port: set KERAS_BACKEND to "
        f"{' or '.join(KERAS_BACKENDS)} before Keras is imported"
    )


def _refuse(model: Any) -> NoReturn:
    kind, hint = f"{type(model).__module__}.{type(model).__qualname__}", ""
    if kind.startswith("tf_keras"):
        hint = " (tf_keras is Keras 2; unset TF_USE_LEGACY_KERAS and use Keras 3)"
    elif isinstance(model, Mapping) and "jax" in sys.modules:
        hint = ": make arrays of NumPy those of JAX, jax.tree.map(jax.numpy.asarray, params)"
    elif isinstance(model, Mapping):
        hint = ": pass list(models.values())"
    elif kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        hint = (
            ": a parameter that belongs to no module needs only its optimizer, beside that of a "
            "model: hvkit.distribute(actor, [actor_optimizer, alpha_optimizer])"
        )
    raise TypeError(
        "model must be a torch.nn.Module, a keras.Model or an nnx.Module, or a list of them, or a "
        f"pytree with arrays of JAX, got {kind}{hint}"
    )
