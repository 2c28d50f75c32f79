"""Start a command, forward signals to it, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

POLITE = 1.5  # seconds after which ranks that their launcher left behind are told too
PATIENCE = 4.0  # seconds until what is left is killed, by default; docker stop waits for 10
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


class Child:
    """A command in a session of its own, with everything that it starts.

    torchrun puts every rank into a session of its own, so no process group holds them all; and a
    rank whose launcher was killed would be handed to PID 1.  This process is made their reaper, so
    that they stay its descendants and are found.

    ``on_line`` gets every line of stderr (and of stdout too with ``everything``); ``raw`` is where
    the bytes of stderr go as they come.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], object],
        *,
        cwd: str | None = None,
        everything: bool = False,
        stdin: int | None = None,
        raw: int | None = None,
    ) -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE if everything else None,
            stderr=subprocess.STDOUT if everything else subprocess.PIPE,
            start_new_session=True,
            # if this process is killed, the launcher is told to end its ranks
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        self._done: queue.Queue[int] = queue.Queue()
        stream = self.process.stdout if everything else self.process.stderr
        assert stream is not None
        self._reader = threading.Thread(target=_read, args=(stream, on_line, raw), daemon=True)
        self._reader.start()
        threading.Thread(target=lambda: self._done.put(self.process.wait()), daemon=True).start()

    def wait(self, seconds: float) -> int | None:
        """The exit code (negative: a signal), or None if it still runs after ``seconds``."""
        try:
            code = self._done.get(timeout=seconds)
        except queue.Empty:
            return None
        self._done.put(code)
        return code

    def end(
        self,
        number: int = signal.SIGTERM,
        *,
        hurry: Callable[[], bool] = lambda: False,
        patience: float = PATIENCE,
    ) -> None:
        """End it and everything that it started: ask, and kill what is left after ``patience`` seconds.

        Its launcher passes the signal on to the ranks.  Only ranks whose launcher has gone are told
        here, so that one that saves a checkpoint is asked once.  Returns when nothing is left.
        ``hurry`` is asked all the time whether to kill at once.
        """
        started = time.monotonic()
        self._signal_group(number)
        told = killed = False
        while self.alive():
            passed = time.monotonic() - started
            if not killed and (hurry() or passed > patience):
                killed = True
                _signal_all(signal.SIGKILL)
            elif not told and passed > POLITE and self.wait(0.001) is not None:
                told = True
                _signal_all(signal.SIGTERM)
            elif killed:
                _signal_all(signal.SIGKILL)  # what was started in the meantime
            if passed > patience + 3:
                break  # in uninterruptible sleep: nothing more can be done
            time.sleep(0.05)
        self._reader.join(timeout=1)
        reap()

    def alive(self) -> bool:
        """Is it, or anything that it started, still running?"""
        return self.wait(0.001) is None or bool(descendants())

    def finish(self) -> None:
        """After its end: read what it still printed, end what it left behind."""
        if descendants():
            self.end()
        self._reader.join(timeout=2)
        reap()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def descendants() -> list[int]:
    """Living processes that this one started, directly or not, from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(name)] = int(parent)
    found: list[int] = []
    known = {os.getpid()}
    while more := [pid for pid, parent in parents.items() if parent in known and pid not in known]:
        found += more
        known |= set(more)
    return found


def _signal_all(number: int) -> None:
    for pid in descendants():
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def reap() -> None:
    """Collect the orphans that were handed to this process."""
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _read(stream: IO[bytes], on_line: Callable[[str], object], raw: int | None) -> None:
    """Cut a stream into lines; progress bars end theirs with a carriage return."""
    pending = b""
    while True:
        try:
            chunk = os.read(stream.fileno(), 65536)
        except OSError:
            break
        if not chunk:
            break
        if raw is not None:
            _write_all(raw, chunk)
        *lines, pending = (pending + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))
    if pending:
        on_line(pending.decode(errors="replace"))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError:
            return


class Signals:
    """Remembers INT and TERM (and HUP: a closed terminal) for a loop that looks at them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: Any) -> None:
        self.received.append(number)

    @property
    def first(self) -> int | None:
        """The first one, which says how to end; None as long as there is none."""
        return self.received[0] if self.received else None

    @property
    def again(self) -> bool:
        """Was it asked for twice?  Then nobody wants to wait."""
        return len(self.received) > 1
