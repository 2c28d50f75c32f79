"""YAML whose every value knows its line.

PyYAML drops positions and keeps the last of two equal keys.  We compose the node tree first,
refuse duplicates there, and look up ``file:line`` for any path of keys later.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from trainyard.model import InputError, Where

Key = str | int
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """A schema that takes exact types and known keys only."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one place."""

    where: Where
    text: str


def refuse(problems: Iterable[Problem]) -> None:
    """Raise the first problem in file order, saying how many more there are."""
    ordered = sorted(problems, key=lambda p: p.where.line)
    if not ordered:
        return
    more = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    raise InputError(f"{ordered[0].where}: {ordered[0].text}{more}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean "torch"?`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def listed(words: Iterable[str]) -> str:
    """``a, b, c``, or ``none``."""
    return ", ".join(words) or "none"


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and the node tree for positions."""

    path: Path
    root: yaml.Node
    data: Any

    def where(self, *keys: Key) -> Where:
        """The line of the value at ``keys``, or of the deepest part of it that exists.

        A mapping or list is found at its key: that is the line a reader looks for.
        """
        node, line = self.root, self.root.start_mark.line
        for key in keys:
            step = _child(node, key)
            if step is None:
                break
            mark, node = step
            line = mark.start_mark.line
        return Where(self.path, line + 1)

    def raw(self, *keys: Key) -> str | None:
        """The text of a scalar as it stands in the file, without quotes."""
        node: yaml.Node = self.root
        for key in keys:
            step = _child(node, key)
            if step is None:
                return None
            node = step[1]
        return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def _child(node: yaml.Node, key: Key) -> tuple[yaml.Node, yaml.Node] | None:
    """The node whose line stands for ``key``, and the value under it."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            if key_node.value == str(key):
                return key_node, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key], node.value[key]
    return None


def read(path: Path) -> Document:
    """Parse ``path``; a syntax error or a key given twice is an :class:`InputError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}:1: no such file; create it, or name another one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}:1: cannot be read as UTF-8 text: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InputError(_syntax(path, error)) from None
    except RecursionError:
        raise InputError(f"{path}:1: not YAML we can read: nested too deeply") from None
    if root is None:
        raise InputError(f"{path}:1: the file is empty; see matrix.yaml in the repository")
    problems: list[Problem] = []
    data = _plain(root, path, problems, ())
    refuse(problems)
    return Document(path, root, data)


def _syntax(path: Path, error: yaml.YAMLError) -> str:
    """PyYAML's several lines as one."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{path}:1: not YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    context = f"{error.context}: " if error.context else ""
    line = mark.line + 1 if mark else 1
    column = f" at column {mark.column + 1}" if mark else ""
    return f"{path}:{line}: not YAML: {context}{error.problem}{column}"


def _plain(node: yaml.Node, path: Path, problems: list[Problem], above: tuple[yaml.Node, ...]) -> Any:
    """The node as dict, list or scalar; duplicates and cycles go to ``problems``."""
    if node in above:
        where = Where(path, node.start_mark.line + 1)
        problems.append(Problem(where, "an alias (*name) contains itself; write the value out"))
        return None
    below = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, path, problems, below) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value in node.value:
            where = Where(path, key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(Problem(where, "a key must be a plain word"))
                continue
            key = str(key_node.value)
            if key in result:
                text = (
                    f'duplicate key "{key}": it is already on line {first[key]} and YAML would '
                    "silently keep the last one; remove one of the two"
                )
                problems.append(Problem(where, text))
            first.setdefault(key, where.line)
            result[key] = _plain(value, path, problems, below)
        return result
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, LookupError, AttributeError, yaml.YAMLError):
        # Looks like a date or a tag but is none.  The schema refuses it, with the raw text.
        return object()


def validate(document: Document, schema: type[M]) -> M:
    """``document`` as ``schema``, or one message with the line of the first error."""
    if not isinstance(document.data, dict):
        where = document.where()
        raise InputError(f"{where}: expected keys and values at the top: {_keys(schema)}")
    try:
        return schema.model_validate(document.data)
    except ValidationError as error:
        errors = _without_typos(error.errors())
        refuse(_problem(document, schema, details) for details in errors)
        raise  # not reached: pydantic never reports zero errors


def _without_typos(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Less the missing keys that are there misspelled: one mistake, one message."""
    unknown = [e["loc"] for e in errors if e["type"] == "extra_forbidden"]

    def is_typo(loc: tuple[Key, ...]) -> bool:
        beside = [str(other[-1]) for other in unknown if other[:-1] == loc[:-1]]
        return bool(difflib.get_close_matches(str(loc[-1]), beside, n=1))

    return [e for e in errors if not (e["type"] == "missing" and is_typo(e["loc"]))]


def _keys(schema: type[BaseModel]) -> str:
    return listed(schema.model_fields)


def _problem(document: Document, schema: type[BaseModel], details: ErrorDetails) -> Problem:
    loc = tuple(details["loc"])
    field = ".".join(str(part) for part in loc)
    where = document.where(*loc)
    kind = details["type"]
    if kind == "extra_forbidden":
        known = _fields_at(schema, loc[:-1])
        text = f'unknown key "{field}"{did_you_mean(str(loc[-1]), known)}'
        return Problem(where, f"{text}; known here: {listed(known)}")
    if kind == "missing":
        return Problem(where, f'missing key "{field}"; add it')
    return Problem(where, f"{field}: {_expected(document.raw(*loc), details)}")


def _expected(raw: str | None, details: ErrorDetails) -> str:
    """What was found and what would be accepted, in our words."""
    kind = details["type"]
    if kind == "string_type":
        if raw is None:
            return "expected one string, found a list or a mapping"
        if raw == "" or details["input"] is None:
            return 'is empty; write a value in quotes, or "" for an empty one'
        seen = f", YAML reads it as {details['input']!r}" if str(details["input"]) != raw else ""
        return f'{raw} is not a string{seen}; write it quoted: "{raw}"'
    shown = re.sub(r"//[^/@]*@", "//***@", raw) if raw else raw  # an address can hold a password
    found = f'"{shown}"' if raw is not None else "this"
    if kind == "value_error":  # the words of a check of ours
        return f"{found} {details['msg'].removeprefix('Value error, ')}"
    if kind == "literal_error":
        expected = details.get("ctx", {}).get("expected", "")
        accepted = str(expected).replace("'", "").replace(" or ", ", ")
        choices = [word.strip() for word in accepted.split(",")]
        return f"unknown value {found}{did_you_mean(raw or '', choices)}; accepted: {accepted}"
    if kind in {"dict_type", "model_type"}:
        return f"{found} is not a mapping; write keys and values (key: value)"
    if kind == "list_type":
        return f"{found} is not a list; write [a, b]"
    return f"{found}: {details['msg']}"


def _fields_at(schema: type[BaseModel], loc: Sequence[Key]) -> list[str]:
    """The keys that the schema knows at ``loc``."""
    model: Any = schema
    for part in loc:
        if isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(str(part))
            model = field.annotation if field else None
        else:  # dict[str, X] or list[X]: X comes last
            model = _inner(model)
        model = _optional(model)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _inner(annotation: Any) -> Any:
    args = getattr(annotation, "__args__", ())
    return args[-1] if args else None


def _optional(annotation: Any) -> Any:
    """``X`` of ``X | None``."""
    args = getattr(annotation, "__args__", ())
    if type(None) in args:
        return next(arg for arg in args if arg is not type(None))
    return annotation
