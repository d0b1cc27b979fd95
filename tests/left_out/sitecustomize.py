"""Leaves PyTorch's compiler out of a script until that uses it, and out of Keras what no test uses.

PyTorch imports its compiler as soon as an optimizer is made, for two seconds: half of a rank's
start. Python imports this file at its own start if the folder is on ``PYTHONPATH``.
"""

import importlib
import os
import sys
from types import ModuleType

sys.path.append(os.path.dirname(os.path.dirname(__file__)))
import lighter_keras  # noqa: F401

sys.path.pop()


class Compiler(ModuleType):
    """What PyTorch calls of ``torch._dynamo`` while it compiles nothing."""

    @staticmethod
    def disable(function=None, *args, **kwargs):
        return (lambda decorated: decorated) if function is None else function

    @staticmethod
    def graph_break():
        pass

    def __getattr__(self, name):
        if name != "__path__" and name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


sys.modules["torch._dynamo"] = Compiler("torch._dynamo")
