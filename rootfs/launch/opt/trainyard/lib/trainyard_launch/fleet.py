"""A run on the hosts of a hostfile: look at all of them, start, watch, and end all together."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainyard_node import checks, facts

from trainyard_launch import command, network, ssh
from trainyard_launch.agent import BEAT, job_node
from trainyard_launch.errors import BAD_INPUT, FAILED, LaunchError
from trainyard_launch.failure import Failure
from trainyard_launch.hostfile import Host
from trainyard_launch.place import DEFAULT_PORT, is_loopback
from trainyard_launch.processes import PATIENCE, Signals

PROBE_PATIENCE = 20.0  # seconds for a host to answer; ssh itself gives up after 5
LOST_AFTER = 4 * BEAT + 0.5  # seconds without a sign of life, once something is wrong
LOST_ALWAYS = 15.0  # seconds without one, when nothing else is; ssh notices after 6 to 8
SETTLE = 1.5  # seconds in which a failure that came first may still arrive second
GRACE = 8.0  # seconds at most to find out whether a host was lost
ENDING = 3.0  # seconds for the agents to end their ranks, beside what the ranks themselves may take
TICK = 2.0  # seconds between two signs of life from here


# -- looking -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """What a host said about itself, or why it said nothing."""

    host: str
    local: bool
    problem: str = ""
    facts: facts.Facts | None = None
    cwd: bool = True
    script: bool = True
    deepspeed: bool = True
    routes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    port: int | None = None
    other_port: int | None = None
    connection: Sequence[str] = ()
    devices: str | None = None  # its CUDA_VISIBLE_DEVICES

    def addresses(self) -> set[str]:
        """Its addresses that others may reach."""
        found = self.facts.interfaces if self.facts else ()
        return {address for _name, address in found if not is_loopback(address)}

    def interface(self, address: str) -> str:
        """The interface that has an address, or ``""``."""
        found = self.facts.interfaces if self.facts else ()
        return next((name for name, has in found if has == address), "")


def probe_all(
    hosts: Sequence[Host],
    *,
    ssh_port: int | None,
    cwd: str,
    script: command.Script,
    env: Mapping[str, str],
    master_port: int | None,
) -> list[Probe]:
    """Ask every host at the same time."""
    job = {
        "mode": "probe", "cwd": cwd, "script": script.name, "module": script.module, "env": dict(env),
        "names": [hosts[0].name.rpartition("@")[2]], "port": master_port or DEFAULT_PORT,
    }  # fmt: skip
    own = facts.interfaces()
    own_name = socket.gethostname()

    def ask(host: Host) -> Probe:
        local = network.is_here(host.name, own_name, own)
        return _probe(host.name, ssh.command(host.name, local=local, port=ssh_port), job, local)

    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        return list(pool.map(ask, hosts))


def _probe(host: str, words: list[str], job: Mapping[str, Any], local: bool) -> Probe:
    try:
        done = subprocess.run(
            words, input=json.dumps(job).encode() + b"\n", capture_output=True, timeout=PROBE_PATIENCE,
            check=False, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return Probe(host, local, "this image has no ssh client (feature sshd)")
    except subprocess.TimeoutExpired as late:
        return Probe(host, local, ssh.reason((late.stderr or b"").decode(errors="replace"), None))
    for line in done.stdout.splitlines():
        event = as_event(line)
        if event and event.pop("event") == "facts":
            found = facts.from_json(event.pop("facts"))
            return Probe(host, local, facts=found, **event)
    return Probe(host, local, ssh.reason(done.stderr.decode(errors="replace"), done.returncode))


def as_event(line: bytes) -> dict[str, Any] | None:
    """An agent's line, or None for what something else printed (a shell's start-up files, say)."""
    if not line.startswith(b'{"event":'):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def problems(
    probes: Sequence[Probe],
    slots: Mapping[str, int],
    *,
    engine: str,
    script: command.Script,
    cwd: str,
    with_checks: bool,
) -> tuple[list[str], list[str], int]:
    """Everything that is wrong, everything that is doubtful, and the exit code for the former."""
    wrong: list[str] = []
    doubtful: dict[tuple[str, str], list[str]] = {}
    code = FAILED
    reference = next((probe for probe in probes if probe.local and probe.facts), None) or next(
        (probe for probe in probes if probe.facts), None
    )
    for probe in probes:
        if probe.facts is None:
            wrong.append(f"{probe.host} does not answer: {probe.problem}")
            continue
        if not probe.cwd:
            wrong.append(
                f"{probe.host}: there is no folder {cwd}; the job starts in the same one on every host"
            )
            code = BAD_INPUT
        elif not probe.script:
            wrong.append(f"{probe.host}: {script.name} does not exist in {cwd}; mount it on every host")
            code = BAD_INPUT
        if engine == "deepspeed" and not probe.deepspeed:
            wrong.append(f"{probe.host}: its image has no DeepSpeed; use --engine torchrun")
            code = BAD_INPUT
        elif engine == "deepspeed" and (
            problem := command.device_problem(probe.devices, slots[probe.host], probe.facts.gpus, len(probes))
        ):
            wrong.append(f"{probe.host}: {problem}")
            code = BAD_INPUT
        if not with_checks:
            continue
        assert reference is not None
        assert reference.facts is not None
        if (probe.facts.image, probe.facts.contents) != (reference.facts.image, reference.facts.contents):
            wrong.append(
                f"{probe.host} holds another image: {_image(probe.facts)}, but {reference.host} holds "
                f"{_image(reference.facts)}. Remedy: start the same image on every host"
            )
        for finding in checks.check(probe.facts, ranks=slots[probe.host]):
            if finding.severity == "error":
                wrong.append(f"{probe.host}: {finding.text}. Remedy: {finding.remedy}")
            elif finding.severity == "warning":
                doubtful.setdefault((finding.text, finding.remedy), []).append(probe.host)
    warnings = [f"{', '.join(who)}: {text}. Remedy: {remedy}" for (text, remedy), who in doubtful.items()]
    return wrong, warnings, code


def _image(found: facts.Facts) -> str:
    return f"{found.image or 'no Trainyard image'} ({found.contents or 'contents unknown'})"


def choose_master(probes: Sequence[Probe], wanted: str) -> tuple[str, str]:
    """The address at which all hosts reach the first one, and how it was found."""
    if wanted:
        return wanted, "--master-addr"
    first, others = probes[0], probes[1:]
    if not others:
        return "127.0.0.1", "one host"
    own = first.addresses()
    name = first.host.rpartition("@")[2]
    seen = {probe.routes[name][0] for probe in others if name in probe.routes}
    if len(seen) == 1 and (address := seen.pop()) in own:
        return address, f"what {name} means on the other hosts"
    if not first.local and len(first.connection) == 4 and first.connection[2] in own:
        return first.connection[2], f"where ssh reached {name}"
    if first.local:
        for probe in others:
            if len(probe.connection) == 4 and probe.connection[0] in own:
                return probe.connection[0], f"where {probe.host} sees this host"
    raise LaunchError(
        f"the other hosts do not reach {name} under that name: none of its addresses "
        f"({', '.join(sorted(own)) or 'none'}) is what the name means there. Give --master-addr", FAILED
    )  # fmt: skip


def choose_port(first: Probe, wanted: int | None) -> int:
    """A port that is free on the first host."""
    if first.port is not None:
        return first.port
    if wanted:
        raise LaunchError(f"{first.host}: port {wanted} is taken. Remedy: another --master-port", FAILED)
    if first.other_port is None:
        raise LaunchError(f"{first.host}: no free port", FAILED)
    return first.other_port


# -- running -------------------------------------------------------------------------------


@dataclass
class Worker:
    """A host in a run."""

    name: str
    process: subprocess.Popen[bytes]
    heard: float
    ended: int | None = None  # the exit code that its agent reported
    gone: bool = False  # nothing comes from there any more
    said: list[str] = field(default_factory=list)  # ssh's own words

    @property
    def open(self) -> bool:
        """May its ranks still run?"""
        return self.ended is None and not self.gone

    def send(self, data: bytes) -> None:
        """Write to the lifeline; a broken one is noticed elsewhere."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except (OSError, ValueError):
            pass

    def cut(self) -> None:
        """Let go of the lifeline: the agent ends its ranks."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
        except OSError:
            pass


class Run:
    """All hosts of a run, from the start to the end of the last rank."""

    def __init__(
        self,
        nodes: Sequence[tuple[str, list[str], command.Node]],
        env: Mapping[str, str],
        cwd: str,
        grace: float = PATIENCE,
    ):
        self.grace = grace
        self.events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.signals = Signals()
        self.failures: dict[int, Failure] = {}  # by host, in the order in which they came
        self.workers: list[Worker] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        width = max(len(name) for name, _words, _node in nodes)
        for index, (name, words, node) in enumerate(nodes):
            # ssh must not die of the terminal's Ctrl-C: the agents need it to say goodbye
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            worker = Worker(name, process, time.monotonic())
            self.workers.append(worker)
            job = {"mode": "run", "node": job_node(node), "env": dict(env), "cwd": cwd, "grace": grace}
            worker.send(json.dumps(job).encode() + b"\n")
            prefix = f"{name:<{width}} | "
            for target in (self._read_events, self._read_errors):
                threading.Thread(target=target, args=(index, worker, prefix), daemon=True).start()

    def _read_events(self, index: int, worker: Worker, prefix: str) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            event = as_event(line)
            if event is None:
                self._print(prefix + line.decode(errors="replace").rstrip("\r\n"))
            elif event["event"] == "line":
                worker.heard = time.monotonic()
                self._print(prefix + event["text"])
            else:
                self.events.put((index, event))
        worker.process.wait()
        self.events.put((index, None))

    def _read_errors(self, _index: int, worker: Worker, prefix: str) -> None:
        assert worker.process.stderr is not None
        for line in worker.process.stderr:
            text = line.decode(errors="replace").rstrip("\r\n")
            worker.said.append(text)
            self._print(prefix + text)

    def _print(self, text: str) -> None:
        self._lines.put(text)

    def _write(self) -> None:
        """Print what came, in a thread of its own.

        Whoever reads our output may stop for a while (a pager, Ctrl-S, a log on a slow disk).  That
        must not keep anybody from hearing the hosts, which would then look lost.
        """
        while (text := self._lines.get()) is not None:
            try:
                print(text, flush=True)
            except OSError:
                self.signals.received.append(signal.SIGTERM)  # nobody reads: head has what it wanted
                return

    def _flush(self) -> None:
        """Wait until all is printed; not for a reader that stopped, once somebody wants to leave."""
        self._lines.put(None)
        while self._writer.is_alive() and not self.signals.first:
            self._writer.join(0.1)
        self._writer.join(1.0)

    def _take(self, seconds: float) -> None:
        """Take in what comes within some time."""
        try:
            index, event = self.events.get(timeout=seconds)
        except queue.Empty:
            return
        worker = self.workers[index]
        worker.heard = time.monotonic()
        if event is None:
            worker.gone = worker.ended is None
        elif event["event"] == "ended":
            worker.ended = event["code"]
        elif event["event"] == "failed":
            event.pop("event")
            self.failures[index] = Failure(**event)

    def lost(self, after: float) -> list[Worker]:
        """Hosts whose agent has gone, or was silent for some time."""
        now = time.monotonic()
        return [
            worker
            for worker in self.workers
            if worker.gone or (worker.ended is None and now - worker.heard > after)
        ]

    def watch(self) -> int:
        """Until everything has ended; returns the exit code, and the last line says why."""
        tick = 0.0
        while any(worker.open for worker in self.workers):
            self._take(0.1)
            if time.monotonic() - tick > TICK:
                tick = time.monotonic()
                for worker in self.workers:
                    worker.send(b"\n")
            if self.signals.first:
                name = signal.Signals(self.signals.first).name
                self.end()
                print(f"launch: {name}: ended on every host", file=sys.stderr)
                return 128 + self.signals.first
            if self.failures or self.lost(LOST_ALWAYS) or any(worker.ended for worker in self.workers):
                break
        else:
            self._flush()
            return 0
        return self._failed(time.monotonic())

    def _failed(self, since: float) -> int:
        """Something failed: find out what came first, end the rest, say it."""
        tick = since
        while time.monotonic() - since < GRACE and not self.signals.first:
            self._take(0.05)
            passed = time.monotonic() - since
            if time.monotonic() - tick > TICK:
                tick = time.monotonic()
                for worker in self.workers:
                    worker.send(b"\n")
            if self.lost(LOST_AFTER):
                break
            answered = all(worker.ended is not None or worker.heard > since + BEAT for worker in self.workers)
            if passed > SETTLE and answered:
                break
        lost = self.lost(LOST_AFTER)
        self.end()
        said = [(worker.name, ssh.reason("\n".join(worker.said[-3:]), 0)) for worker in lost]
        code, text = verdict(
            {self.workers[index].name: failure for index, failure in self.failures.items()},
            [(name, "" if text == "exit code 0" else text) for name, text in said],
            {worker.name: worker.ended for worker in self.workers if worker.ended},
        )
        if self.signals.first:
            code = 128 + self.signals.first
        print(f"launch: {text}", file=sys.stderr, flush=True)
        return code

    def end(self) -> None:
        """End the ranks of every host; bounded, whatever the hosts do."""
        asked = len(self.signals.received)
        deadline = time.monotonic() + self.grace + ENDING
        for worker in self.workers:
            worker.cut()
        while any(worker.open for worker in self.workers) and time.monotonic() < deadline:
            self._take(0.05)
            if not any(worker.open for worker in self.workers if worker not in self.lost(LOST_AFTER)):
                break  # only those are left that will never answer
            if len(self.signals.received) > max(asked, 1):
                break
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.terminate()
        time.sleep(0.1)
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        self._flush()


def verdict(
    failures: Mapping[str, Failure], lost: Sequence[tuple[str, str]], ended: Mapping[str, int | None]
) -> tuple[int, str]:
    """Exit code and last line of a failed run.

    A host that was lost explains why ranks elsewhere failed, so it comes first; then ranks that
    failed by themselves; then those that only lost a connection.
    """
    if lost:
        names = ", ".join(name for name, _said in lost)
        said = next((f"; ssh: {text}" for _name, text in lost if text), "")
        verb = "does" if len(lost) == 1 else "do"
        return (
            1,
            f"{names} {verb} not answer any more (killed or unreachable){said}; the other ranks were ended",
        )
    ranked = sorted(failures.items(), key=lambda item: item[1].consequence)  # stable: first came first
    if ranked:
        name, failure = ranked[0]
        who = f"rank {failure.rank} on {name}" if failure.rank is not None else name
        return failure.code, f"{who} failed first: {failure.why}; the other ranks were ended"
    name, code = next(iter(ended.items()), ("a host", 1))
    return code or 1, f"{name} failed first: exit code {code}; the other ranks were ended"
