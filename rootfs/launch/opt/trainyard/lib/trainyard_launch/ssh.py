"""Reaching a host: with the OpenSSH client, or directly where it is this one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

REMOTE = "/usr/local/bin/launch"
# Fail in seconds, never ask: https://man.openbsd.org/ssh_config
OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=5",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
)

_HINTS = (
    (r"Permission denied", "its authorized keys do not hold a key of this host's: see start-sshd --help"),
    (r"Host key verification failed|REMOTE HOST IDENTIFICATION", "its host key is not (or no longer) trusted "
     "here: use one cluster key for all nodes (start-sshd --help), or ssh-keyscan it into known_hosts"),
    (r"Connection refused", "is start-sshd running there, on this port? (--ssh-port)"),
    (r"Could not resolve hostname", "is the name in the hostfile right, and on the same network?"),
    (r"timed out|No route to host|unreachable", "is the machine up, and on the same network?"),
    (r"launch: (?:No such file|not found|command not found)|No such file or directory|not found",
     "it runs no Trainyard image, or one without the feature launch"),
)  # fmt: skip


def command(host: str, *, local: bool, port: int | None) -> list[str]:
    """The command that starts an agent on a host."""
    if local:
        return [sys.executable, str(Path(sys.argv[0]).resolve()), "--agent"]
    options = [word for option in OPTIONS for word in ("-o", option)]
    where = ["-p", str(port)] if port else []
    return ["ssh", "-T", *options, *where, host, REMOTE, "--agent"]


def reason(stderr: str, code: int | None) -> str:
    """Why a host did not answer: what ssh said last, and a hint."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    chosen = [line for line in lines if any(re.search(pattern, line) for pattern, _hint in _HINTS)]
    said = (chosen or lines)[-1] if lines else ("no answer in time" if code is None else f"exit code {code}")
    for pattern, hint in _HINTS:
        if re.search(pattern, stderr):
            return f"{said} ({hint})"
    return said
