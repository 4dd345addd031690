"""Fills the templates of texts that studies write: they lie beside the modules that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def filled(module: str, template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Returns the text of a template in the folder of `module`."""
    loader = PackageLoader(module.rpartition(".")[0], "")
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined)
    environment.filters |= filters or {}
    return environment.get_template(template).render(**values)
