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

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(sys.modules[self.__name__], name)
        except (KeyError, AttributeError):  # not imported, or not yet to its end
            return getattr(importlib.import_module(self.__name__), name)


NAMED: set[str] = set()
"""All modules that were named so; the check of a new release imports each."""


def at_need(module: str) -> Any:
    """Returns a stand-in for a module.

    >>> at_need("fractions").Fraction("1/4")
    Fraction(1, 4)
    """
    NAMED.add(module)
    return _AtNeed(module)
