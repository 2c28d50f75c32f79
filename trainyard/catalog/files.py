"""Read the files that a catalog is made from, with one message where a file cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainyard.model import InputError


def read_text(path: Path) -> str:
    """The text of a file; raises InputError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); make it anew or remove it") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises InputError where there is none."""
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); make it anew or remove it") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: not a JSON object; make it anew or remove it")
    return found
