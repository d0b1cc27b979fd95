"""Models from HDF5 files, as Keras 2 saved them.

Keras 3 builds the optimizer of such a model for no variables, and leaves its state in the file. The
first update then fails (keras/src/legacy/saving/legacy_h5_format.py, 3.15).
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

# The iteration and the rate: all that an optimizer has before it is built.
_OF_UNUSED = 2


def restore_optimizer(model: Any, path: Any) -> None:
    """Give a model that was loaded from a file its optimizer's state, unless Keras has done so."""
    loaded, variables = model.optimizer, model.trainable_variables
    if loaded is None or not loaded.built or loaded._trainable_variables or not variables:
        return
    if not h5py.is_hdf5(path):
        return
    optimizer = type(loaded).from_config(loaded.get_config())
    optimizer.build(variables)
    with h5py.File(path, "r") as file:
        arrays = [np.asarray(each) for each in load_optimizer_weights_from_hdf5_group(file)]
    found, wanted = [each.shape for each in arrays], [tuple(v.shape) for v in optimizer.variables]
    if len(found) == _OF_UNUSED:  # saved before the first update
        wanted = wanted[:_OF_UNUSED]
    if found != wanted:
        raise ValueError(
            f"{path} has optimizer state of shapes {found}, but {type(optimizer).__name__} of this "
            f"model has {wanted}: load with compile=False, and compile the model anew"
        )
    for variable, array in zip(optimizer.variables, arrays, strict=False):
        variable.assign(array)
    model.optimizer = optimizer
