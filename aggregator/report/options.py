"""Makes commands whose options are the fields of dataclasses. Programs use the dataclasses without typer.

@dataclass(frozen=True)
class Options:
    rounds: Annotated[AtLeast1, Option(help="Number of rounds.")] = 10

@app.command()
@with_options
def simulate(task: Path, options: Options) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Meta

from hushfleet.field_types import MAX_COUNT


class Option:
    """The arguments of a `typer.Option`; its bounds are those of the field's `msgspec.Meta`."""

    def __init__(self, *names: str, **about: Any) -> None:
        self.names, self.about = names, about


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that shows typer the fields of its dataclasses as options, and receives the dataclasses."""
    hints, bare, groups = get_type_hints(command, include_extras=True), get_type_hints(command), dict[str, Any]()
    shown, options = list[inspect.Parameter](), list[inspect.Parameter]()
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(kind := hints[name]):
            groups[name], types, plain = kind, get_type_hints(kind, include_extras=True), get_type_hints(kind)
            for field in fields(kind):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                options.append(_parameter(field.name, types[field.name], plain[field.name], default))
        else:
            shown.append(_parameter(name, kind, bare[name], parameter.default))
    shown += options

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    expanded.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # typer and inspect read it
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return expanded


def _parameter(name: str, kind: Any, plain: Any, default: Any) -> inspect.Parameter:
    """Makes a parameter as typer reads it.

    :param plain: its type without what it is annotated with.
    """
    import typer

    if option := next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Option)), None):
        annotated = (kind, *get_args(get_args(kind)[0]))
        metas = [meta for each in annotated for meta in getattr(each, "__metadata__", ()) if isinstance(meta, Meta)]
        bounds: dict[str, Any] = {
            key: end for meta in metas for key, end in (("min", meta.ge), ("max", meta.le)) if end != MAX_COUNT
        }
        kind = Annotated[plain, typer.Option(*option.names, **{**bounds, **option.about})]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
