"""Rules between settings: tables whose rows have a code, a condition and a sentence for people.

A code such as `model.features-need-linear` is stable: programs and tests compare codes, and people read sentences. In a
sentence `{name}` is the value of a setting, as for `str.format`, `{name!r}` is a value as an error shows it, `{name!l}`
one as a list, and `{name!n}` its length.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hushfleet.errors import format_value

Rule = tuple[Callable[[Any], object], str]
"""Says whether settings break the rule, and the sentence; a dict in place of True has more values for the sentence."""
Rules = Mapping[str, Rule]
NO_RULES: Rules = {}


class BrokenRule(ValueError):
    """Settings that are not valid together.

    :param code: of the rule.
    """

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


def check_rules(settings: Any, rules: Rules) -> None:
    """Raises `BrokenRule` for the first rule of a table that these settings break."""
    for code, (is_broken, sentence) in rules.items():
        if found := is_broken(settings):
            more = found if isinstance(found, dict) else {}
            raise BrokenRule(_Sentence().format(sentence, settings, **more), code)


class _Sentence(string.Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)] if key in kwargs else getattr(args[0], str(key))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "n":
            return len(value)
        value = list(value) if conversion == "l" else value
        return format_value(value) if conversion in ("r", "l") else super().convert_field(value, conversion)
