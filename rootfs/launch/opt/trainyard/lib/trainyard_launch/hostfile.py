"""Hostfiles: a line ``host slots=N`` for each node, in the order of their ranks.

The format is the one DeepSpeed and Open MPI read.  It is read strictly: a line that is skipped in
silence is a node that is missing in training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainyard_launch.errors import LaunchError

_HOST = re.compile(r"[A-Za-z0-9_.:%@-]+")
_EXPECTED = "a line is `host slots=N`, for example `node1 slots=8`"


@dataclass(frozen=True)
class Host:
    """A node of a hostfile; ``slots`` is None where the line does not say how many."""

    name: str
    slots: int | None
    line: int


def read(path: Path) -> list[Host]:
    """The hosts of a file; every wrong line is named in one error."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise LaunchError(f"cannot read the hostfile {path}: {reason}") from None
    return parse(text, str(path))


def parse(text: str, path: str) -> list[Host]:
    """The hosts in the text of a hostfile; ``path`` is for messages."""
    hosts: list[Host] = []
    seen: dict[str, int] = {}
    wrong: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        problem, host = _line(words, number)
        if host is None:
            wrong.append(f"{path}:{number}: {problem}")
        elif host.name in seen:
            wrong.append(
                f"{path}:{number}: {host.name} is already in line {seen[host.name]}; "
                "one line for each host, with all its slots"
            )
        else:
            seen[host.name] = number
            hosts.append(host)
    if wrong:
        raise LaunchError("\n".join(wrong))
    if not hosts:
        raise LaunchError(f"{path} names no host; {_EXPECTED}")
    return hosts


def _line(words: list[str], number: int) -> tuple[str, Host | None]:
    """What is wrong with a line, or its host."""
    name, *rest = words
    shown = " ".join(words)
    if name.startswith("-") or not _HOST.fullmatch(name):
        return f"{name!r} is no host name; {_EXPECTED}", None
    if not rest:
        return "", Host(name, None, number)
    if len(rest) > 1:
        return f"{shown!r} has more than a host and its slots; {_EXPECTED}", None
    key, sign, value = rest[0].partition("=")
    if not sign or key != "slots":
        return f"{rest[0]!r} is not understood; {_EXPECTED}", None
    if not (value.isascii() and value.isdigit()) or int(value) == 0:
        return f"slots={value} is no number of ranks (1 or more); {_EXPECTED}", None
    return "", Host(name, int(value), number)
