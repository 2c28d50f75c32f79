"""One host's side of a run over ssh: ``launch --agent``.

It reads a job, one line of JSON, from stdin and answers with lines of JSON on stdout.  Stdin stays
open as a lifeline: the other side sends an empty line every two seconds, and when stdin ends or
nothing came for a while, the run on this host ends, so that no rank outlives its launcher.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from trainyard_node import facts

from trainyard_launch import command, network
from trainyard_launch.errors import LaunchError
from trainyard_launch.failure import Failure, Watch, shell_code
from trainyard_launch.processes import Child, Signals

BEAT = 1.0  # seconds between two signs of life
SILENCE = 12.0  # seconds without a sign of life from the launcher


class Speaker:
    """Writes events; threads may share it.  ``broken`` once nobody reads any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.broken = False

    def say(self, event: str, **fields: Any) -> None:
        """Send one event."""
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(1, data) :]
            except OSError:
                self.broken = True


class Beats:
    """Signs of life, one every :data:`BEAT` seconds however often it is asked for one."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._last = 0.0

    def tick(self) -> None:
        """Send one if it is time."""
        if time.monotonic() - self._last >= BEAT:
            self._last = time.monotonic()
            self._speaker.say("beat")


class Lifeline:
    """Watches stdin in a thread."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.closed = False
        self.kill = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        for line in sys.stdin.buffer:
            self.heard = time.monotonic()
            self.kill = self.kill or line.strip() == b"kill"
        self.closed = True

    @property
    def cut(self) -> bool:
        """Has the launcher gone, or asked for the end?"""
        return self.closed or self.kill or time.monotonic() - self.heard > SILENCE


def main() -> int:
    """Serve one job; 0 also when the training failed, which is told in words."""
    signals = Signals()
    speaker = Speaker()
    try:
        job = json.loads(sys.stdin.buffer.readline() or b"{}")
        mode = job["mode"]
    except (ValueError, KeyError):
        print("launch: --agent is for launch itself; start it with a hostfile", file=sys.stderr)
        return 2
    if mode == "probe":
        speaker.say("facts", **probe(job))
        return 0
    return run(job, speaker, signals)


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """What the launcher must know about this host before it starts anything."""
    found = facts.collect({**os.environ, **job["env"]})
    script = job["script"]
    there = os.path.isdir(job["cwd"])
    path = os.path.join(job["cwd"], script)
    routes = {}
    for name in job["names"]:
        try:
            address = network.resolve(name)
        except LaunchError:
            continue
        way = network.route(address, found.interfaces)
        routes[name] = [address, way.interface if way else ""]
    return {
        "facts": found._asdict(),
        "cwd": there,
        "script": job["module"] or os.path.isfile(path),
        "deepspeed": importlib.util.find_spec("deepspeed") is not None,
        "routes": routes,
        "port": network.free_port(job["port"]),
        "other_port": network.free_port(),
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def run(job: dict[str, Any], speaker: Speaker, signals: Signals) -> int:
    """Start this host's ranks, report, and end them when the lifeline is cut."""
    node = node_from_job(job["node"])
    env = {**os.environ, **job["env"]}
    for name in command.removed(env, node):
        env.pop(name)
    found = facts.collect(env, ask_driver=False)
    way = network.route(node.master_addr, found.interfaces) if len(node.slots) > 1 else None
    if node.engine == "deepspeed":
        node = replace(node, devices=command.devices(env.get("CUDA_VISIBLE_DEVICES"), node.nproc, found.gpus))
    env |= command.environment(env, threads=max(1, found.cores // node.nproc), route=way)
    watch = Watch(sum(node.slots[: node.node_rank]))
    failed = threading.Event()

    def on_line(text: str) -> None:
        speaker.say("line", text=text)
        if watch.line(text):  # again when the launcher says more than the traceback did
            failed.set()
            say_failure(speaker, watch.failure(1))

    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        hostfile = os.path.join(folder, "hostfile")
        with open(hostfile, "w", encoding="utf-8") as file:
            file.write(command.deepspeed_hosts(node))
        words = command.build(node, hostfile)
        lifeline = Lifeline()
        child = Child(words, env, on_line, cwd=job["cwd"], everything=True, stdin=subprocess.DEVNULL)
        speaker.say("started", command=words)
        beats = Beats(speaker)

        def hurry() -> bool:
            beats.tick()
            return lifeline.kill or signals.again

        while (code := child.wait(0.1)) is None:
            if signals.first or lifeline.cut or speaker.broken:
                number = signals.first or signal.SIGTERM
                child.end(number, hurry=hurry, patience=job["grace"])
                speaker.say("ended", code=128 + number, stopped=True)
                return 0
            beats.tick()
        child.finish()
        if code and not failed.is_set():
            say_failure(speaker, watch.failure(code))
        speaker.say("ended", code=shell_code(code), stopped=False)
    return 0


def say_failure(speaker: Speaker, failure: Failure | None) -> None:
    """Tell the launcher at once; the command itself may take long to end."""
    if failure is not None:
        speaker.say("failed", **asdict(failure))


def job_node(node: command.Node) -> dict[str, Any]:
    """A node as plain data; :func:`node_from_job` reads it."""
    return asdict(node)


def node_from_job(data: Mapping[str, Any]) -> command.Node:
    """A node that came over the wire."""
    script = data["script"]
    return command.Node(
        **{
            **data,
            "script": command.Script(script["name"], tuple(script["arguments"]), script["module"]),
            "slots": tuple(data["slots"]),
            "names": tuple(data["names"]),
        }
    )
