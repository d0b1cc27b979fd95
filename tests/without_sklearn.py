"""Leaves scikit-learn out of Keras, which imports it and SciPy for wrappers that no test uses.

That is a fifth of the time in which Keras starts. What imports scikit-learn itself gets it.
"""

import sys
from types import ModuleType

wrappers = ModuleType("keras.src.wrappers.sklearn_wrapper")
for kind in ("Classifier", "Regressor", "Transformer"):
    setattr(wrappers, f"SKLearn{kind}", None)
sys.modules[wrappers.__name__] = wrappers
