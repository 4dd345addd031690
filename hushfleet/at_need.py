"""Imports a module at the first use of a name in it, so that a board loads only what its tasks and its owner ask for.

The name stands at the top of a file, where imports are:

    if TYPE_CHECKING:
        from hushfleet.secure import membership list
    else:
        roster = at_need("hushfleet.secure.membership_list")
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _AtNeed(ModuleType):
    """It keeps no name: a fault that a test plants in the module must be seen through the stand-in too."""

    def __getattribute__(self, name: str) -> Any:
        own = _own(self, "__dict__")
        module = sys.modules.get(own["__name__"]) if "__loaded__" in own and name[:2] != "__" else None
        return _own(self, name) if module is None else getattr(module, name)

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        self.__dict__["__loaded__"] = True  # by now no other thread is still running it
        return value


_own = object.__getattribute__


NAMED: set[str] = set()
"""All modules that were named so; the check of a new release imports each."""


def at_need(module: str) -> Any:
    """Returns a stand-in for a module.

    >>> at_need("fractions").Fraction("1/4")
    Fraction(1, 4)
    """
    NAMED.add(module)
    return _AtNeed(module)
