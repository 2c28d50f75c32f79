"""Which rank failed first?  Read from what the ranks and their launcher print.

torchrun names the process that it found dead first; when one rank dies, the others fail too
(their connections close), and which of them is found first is chance.  Tracebacks tell them apart:
torch prefixes the lines of an exception with the rank once a process group exists.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_TORCHRUN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: ")
_DEEPSPEED = re.compile(r"--local_rank=(\d+).*exits with return code = (-?\d+)")
_DEEPSPEED_PLAIN = re.compile(r"exits with return code = (-?\d+)")
_EXCEPTION = re.compile(r"^(?:\[rank(\d+)\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)")
# What gloo, NCCL and the TCP store say when the other side has gone.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|remote process exited|Broken pipe|failed to recv|Connection refused"
    r"|Socket Timeout|socketPollConnect|ncclRemoteError|ncclSystemError|DistNetworkError|DistBackendError"
    r"|Timed out waiting|KeyboardInterrupt",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """A rank that failed: its exit code as a shell would give it, and why in words.

    ``consequence``: it only lost its connection to another one.
    """

    rank: int | None
    code: int
    why: str
    consequence: bool = False


class Watch:
    """Reads the output of one node, line by line."""

    def __init__(self, offset: int) -> None:
        self.offset = offset  # the rank of this node's first rank
        self.exceptions: dict[int, str] = {}
        self.unnamed = ""
        self.exits: list[tuple[int | None, int]] = []  # (rank, exit code), in the order of their deaths

    def line(self, text: str) -> bool:
        """Take a line in; True if it says that a rank has died, or is about to.

        The launchers themselves speak only after they have ended the other ranks of the node, which
        can take half a minute; an exception that nobody caught is known at once.
        """
        if found := _EXCEPTION.match(text):
            if found[1]:
                self.exceptions[int(found[1])] = found[2].strip()
                return True
            # Before there is a process group.  It may be caught, or be the launcher's own, so it
            # is only good for explaining what the launcher reports after it.
            if not self.exits:
                self.unnamed = found[2].strip()
        if found := _TORCHRUN.search(text):
            self.exits.append((self.offset + int(found[2]), int(found[1])))
            return True
        if found := _DEEPSPEED.search(text):
            self.exits.append((self.offset + int(found[1]), int(found[2])))
            return True
        if found := _DEEPSPEED_PLAIN.search(text):
            self.exits.append((None, int(found[1])))
            return True
        return False

    def failure(self, code: int) -> Failure | None:
        """The first failure on this node, if its command ended with ``code`` (negative: a signal)."""
        own = [rank for rank, error in self.exceptions.items() if not _PEER_GONE.search(error)]
        if not self.exits and not code:
            return None
        rank, exit_code = self.exits[0] if self.exits else (None, code)
        if exit_code < 0:  # killed: no traceback can tell more
            return Failure(rank, shell_code(exit_code), signal_name(exit_code))
        if own and rank not in own:
            rank = own[0]
        if rank is None and self.exceptions:
            rank = next(iter(self.exceptions))
        error = self.exceptions.get(rank, "") if rank is not None else ""
        if not self.exceptions:
            error = self.unnamed
        why = f"exit code {exit_code}" + (f", {shorten(error)}" if error else "")
        return Failure(rank, shell_code(exit_code), why, bool(_PEER_GONE.search(error)))


def unwrapped(code: int) -> int:
    """The code of a rank, from the exit code of DeepSpeed's launcher.

    It exits with the rank's own code; one that a signal ended has a negative code, of which the
    kernel keeps the lowest 8 bits: 247 for SIGKILL.
    """
    return code - 256 if code >= 256 - 64 else code


def shell_code(code: int) -> int:
    """An exit code as a shell gives it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def signal_name(code: int) -> str:
    """``killed by SIGKILL`` from -9, with the usual reason where there is one."""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": " (out of memory, or somebody killed it)",
        "SIGBUS": " (/dev/shm full?)",
        "SIGSEGV": " (a crash in native code)",
    }.get(name, "")
    return f"killed by {name}{hint}"


def shorten(text: str, width: int = 300) -> str:
    """One line that fits a log."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
