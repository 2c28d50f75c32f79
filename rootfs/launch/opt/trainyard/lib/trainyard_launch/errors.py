"""What ends ``launch`` with a message and not with a traceback."""

from __future__ import annotations

BAD_INPUT = 2
FAILED = 1


class LaunchError(Exception):
    """A message for the user: what is wrong, what would be right, the remedy.

    ``code`` is the exit code: 2 for wrong input, 1 for a node that is not fit or did not answer.
    """

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code
