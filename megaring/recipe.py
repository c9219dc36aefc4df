"""Recipes: YAML files that set defaults of options under the same names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaring.errors import UserError
from megaring.idle import refuse_idle
from megaring.options import Parser, build_parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options from the command line over those of ``--recipe`` over the parser's own defaults.

    Raises UserError for an unknown option or recipe key (naming the nearest one), for values that do not parse, and for
    options that do nothing beside the others (``megaring.idle``).
    """
    parser = build_parser()
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe")
    try:
        recipe = first.parse_known_args(argv)[0].recipe
    except SystemExit:
        raise UserError("--recipe needs the path of a YAML file") from None
    defaults = recipe_defaults(parser, Path(recipe)) if recipe else {}
    parser.set_defaults(**defaults)
    options = parser.parse_args(argv)
    refuse_idle(options, flags=_flags(argv), recipe_keys=defaults.keys())
    return options


def _flags(argv: Sequence[str]) -> set[str]:
    """Names of the options that a command line gives, whatever their values."""
    parser = build_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))


def recipe_defaults(parser: Parser, path: Path) -> dict[str, Any]:
    """The recipe's settings by option name (underscores), parsed as the options themselves are."""
    import yaml

    try:
        text = path.read_text()
        settings = yaml.safe_load(text)
        written = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror}; those of the project are in recipes/") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bytes, dates or nesting that YAML cannot have
        raise UserError(f"recipe {path} is not YAML: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"recipe {path} must be a mapping of option names to values")
    keys: set[str] = set()
    for key in (node.value for node, _ in written.value):  # safe_load keeps the last of equal keys without a word
        name = str(key).replace("-", "_")
        if name in keys:
            raise UserError(f"recipe {path}: {key} is given twice; keep one of them")
        keys.add(name)
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "recipe")}
    defaults = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in actions:
            raise UserError(f"recipe {path}: unknown key {key!r}{parser.nearest(str(key))}")
        defaults[name] = _value(actions[name], key, value, path)
    return defaults


def _value(action: argparse.Action, key: str, value: Any, path: Path) -> Any:
    where = f"recipe {path}: {key}"
    if value is None:
        if action.default is None:
            return None
        raise UserError(f"{where} has no value; give one, or leave the key out for {action.default}")
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise UserError(f"{where} is {value!r}; it is a switch: true or false")
        return value
    if isinstance(value, (bool, list, dict)):
        raise UserError(f"{where} is {value!r}; it takes one value")
    try:
        parsed = action.type(str(value)) if callable(action.type) else str(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{where} is {value!r}: {error}") from None
    if action.choices is not None and parsed not in action.choices:
        raise UserError(f"{where} is {value!r}; choose from {', '.join(map(str, action.choices))}")
    return parsed
