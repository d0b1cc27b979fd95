"""Leaves out of Keras and TensorFlow what they import for parts that no test uses.

That is a third of the time in which Keras starts: JAX for TensorFlow Lite, IPython for an editor of
files, and scikit-learn, with SciPy, for wrappers. What imports these itself gets them.
"""

import sys
from types import ModuleType

# What each module does without if it is not installed.
OPTIONAL = {
    "tensorflow.lite.python.util": "jax",
    "keras.src.callbacks.orbax_checkpoint": "jax",
    "keras.src.saving.file_editor": "IPython",
}


class NotInstalledFor:
    """A finder of modules to which ``OPTIONAL`` is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in OPTIONAL.values():
            importer = sys._getframe(1)
            while importer.f_globals["__name__"].startswith("importlib"):
                importer = importer.f_back
            if OPTIONAL.get(importer.f_globals["__name__"]) == name:
                raise ModuleNotFoundError(f"{name} is left out", name=name)


sys.meta_path.insert(0, NotInstalledFor)

wrappers = ModuleType("keras.src.wrappers.sklearn_wrapper")
for kind in ("Classifier", "Regressor", "Transformer"):
    setattr(wrappers, f"SKLearn{kind}", None)
sys.modules[wrappers.__name__] = wrappers
