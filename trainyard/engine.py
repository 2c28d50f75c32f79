"""The only module that talks to a Docker engine.

Builds go through ``docker buildx build``, since the SDK cannot drive BuildKit
(https://github.com/docker/docker-py/issues/2230); everything else goes through the SDK.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.images import Image
from docker.utils import kwargs_from_env
from requests.exceptions import RequestException

from trainyard import daemon
from trainyard.address import EngineAddress
from trainyard.hostenv import Say, silent
from trainyard.model import StepFailed

#: What setuptools prints as it turns to the next op: the only sign of life for minutes.
COMPILING = re.compile(r"building 'deepspeed[\w.]*\.(\w+?)(?:_op)?' extension")
#: Seconds that a cancelled build gets to end by itself.
CANCEL_GRACE = 20
#: Bytes below which no image build can end well.
MIN_FREE = 4 * 10**9
#: How many times as long everything takes where QEMU runs another CPU's code.
EMULATION = 10
#: What QEMU prints where the program that it runs crashes, and what helps.  Measured: 7.2 ends with a
#: segmentation fault in `import torch` for arm64, 10.0 runs it.
QEMU_CRASH = "qemu: uncaught target signal"
QEMU_TOO_OLD = (
    "QEMU ran this, and an old one cannot import torch for arm64: Debian 12's 7.2 cannot, Debian 13's 10.0 "
    "can. Use that one, or build on an arm64 machine."
)
CACHE_MOUNT = "exec.cachemount"
PROXY_VARIABLES = tuple(
    spelled for name in ("http_proxy", "https_proxy", "no_proxy") for spelled in (name, name.upper())
)
#: What the SDK raises where an engine does not answer, or answers with an error.
LOST = (DockerException, RequestException)
UTF_8 = codecs.getincrementaldecoder("utf-8")
#: Lines of a failed step that the message shows.
TAIL_LINES = 25


@dataclass(frozen=True)
class BuildRequest:
    """What one ``docker buildx build`` is asked for."""

    dockerfile: Path
    context: Path
    log: Path
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    contexts: Mapping[str, Path] = field(default_factory=dict)
    platform: str | None = None  # linux/arm64; the engine's own where None
    target: str | None = None
    tag: str | None = None
    unpack_to: Path | None = None  # write the target's files here instead of making an image


class Engine:
    """A reachable engine with BuildKit."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.host = address.host
        self.docker = str(address.client)
        settings = kwargs_from_env(environment=address.environ())  # TLS, where it is asked for
        self.client = docker.DockerClient(**settings, timeout=600)

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a docker client that must reach this engine."""
        return self.address.environ()

    def answers(self) -> bool:
        """Is the engine still there?"""
        try:
            return bool(self.client.ping())
        except LOST:
            return False

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the docker client; the caller looks at ``returncode``."""
        return subprocess.run(
            [self.docker, *args], env=self.environment, text=True, capture_output=True, check=False
        )

    def image(self, reference: str) -> Image | None:
        """The image of that name or id; None where the engine does not have it."""
        try:
            return self.client.images.get(reference)
        except ImageNotFound:
            return None

    def tag(self, image_id: str, repository: str, tag: str) -> None:
        """Let ``repository:tag`` name this image from now on; one step, so never half done."""
        self.client.images.get(image_id).tag(repository, tag=tag)

    def discard(self, image_id: str) -> None:
        """Remove an image that no name and no container uses any more; leave it otherwise."""
        found = self.image(image_id)
        if found and not found.tags:
            with contextlib.suppress(APIError):  # a container still runs it
                self.client.images.remove(image_id)

    def untag(self, reference: str) -> None:
        """Forget a name; the image stays while another name or container needs it.

        It cleans up behind something, which may be that the engine is gone: no second failure.
        """
        with contextlib.suppress(*LOST):
            self.client.images.remove(reference, noprune=True)

    def save(self, image_id: str, chunk: int) -> Iterator[bytes]:
        """``docker save`` as a stream of pieces of ``chunk`` bytes."""
        yield from self.client.api.get_image(image_id, chunk_size=chunk)

    def load(self, name: str, archive: Iterator[bytes]) -> None:
        """``docker load`` from a stream.  Raises StepFailed with the engine's words."""
        load: Callable[..., Iterable[Any]] = self.client.api.load_image
        try:
            for line in load(archive, quiet=True):
                if isinstance(line, dict) and line.get("error"):
                    raise StepFailed(f"{name}: the engine cannot load it: {line['error']}")
        except APIError as error:
            raise StepFailed(f"{name}: the engine cannot load it: {error.explanation}") from error

    def data_root(self) -> str:
        """Where the engine keeps its images, as a path on its own host."""
        return str(self.client.info().get("DockerRootDir", ""))

    def run_python(self, image: str, script: str, seconds: int = 300) -> str:
        """Run a script in a throwaway container without network; return what it prints.

        An image for another platform than the engine's gets EMULATION times as long.
        Raises StepFailed with the script's stderr where it fails or takes longer than that.
        """
        if self.emulates(image):
            seconds *= EMULATION
        command = [
            self.docker,
            "run",
            "--rm",
            "--init",
            "--interactive",
            "--network",
            "none",
            "--shm-size",
            "1g",
        ]
        command += ["--label", "dev.trainyard.role=measure", "--entrypoint", "timeout", image]
        command += ["-k", "5", str(seconds), "python", "-"]
        done = subprocess.run(
            command, input=script, env=self.environment, text=True, capture_output=True, check=False
        )
        if done.returncode == 124:
            raise StepFailed(f"measuring {image} took longer than {seconds} s")
        if done.returncode:
            words = done.stderr.strip()
            if QEMU_CRASH in words:
                words += "\n" + QEMU_TOO_OLD
            raise StepFailed(f"measuring {image} failed:\n{words}")
        return done.stdout

    def emulates(self, image: str) -> bool:
        """Is the image for another CPU than the engine's own, so that QEMU runs what is in it?"""
        found = self.image(image)
        return found is not None and found.attrs["Architecture"] != self.client.version()["Arch"]

    def layers(self, image_id: str) -> list[dict[str, Any]]:
        """The layers that hold files, base first: size in bytes and what made them."""
        history = self.client.images.get(image_id).history()
        return [
            {"size": entry["Size"], "created_by": " ".join(entry["CreatedBy"].split())}
            for entry in reversed(history)
            if entry["Size"]
        ]

    def platforms(self) -> tuple[str, ...]:
        """What the engine's builder can run: ``linux/amd64``, and ``linux/arm64`` where it is emulated.

        Raises StepFailed where the builder does not answer.
        """
        asked = self.cli("buildx", "inspect", "--bootstrap")  # a builder that sleeps names no platform
        found = re.search(r"^\s*Platforms:\s*(.+)$", asked.stdout, re.MULTILINE)
        if asked.returncode or not found:
            raise StepFailed(
                f"the builder of the engine at {self.host} does not answer: {asked.stderr.strip()}"
            )
        return tuple(one.strip(" *") for one in found[1].split(","))

    def free_bytes(self) -> int | None:
        """Free space where the engine keeps its data; None where that is another machine."""
        root = self.client.info().get("DockerRootDir", "")
        here = self.host.startswith("unix://") and Path(root).is_dir()
        return shutil.disk_usage(root).free if here else None

    def make_room(self, need: int, say: Say = silent) -> None:
        """See to it that a build that may take ``need`` bytes has them, at the cost of caches.

        Of the private engine, downloaded wheels go first; build cache goes where it would not fit
        otherwise; compiled kernels and images never do.  How much a build takes depends on what is
        cached, so too little is only an error where hardly anything would fit.
        Raises StepFailed where less than MIN_FREE is left.
        """
        steps = ((need, CACHE_MOUNT, ("trainyard-uv", ".cache/uv")), (need // 3, "regular", ()))
        for wanted, kind, descriptions in steps:
            free = self.free_bytes()
            if free is None or free >= wanted:
                continue
            if self.address.private:
                say(f"{free / 1e9:.0f} GB free, up to {need / 1e9:.0f} GB needed: removing caches")
                self._prune(kind, descriptions)
        free = self.free_bytes()
        if free is not None and free < MIN_FREE:
            raise StepFailed(
                f"{free / 1e9:.0f} GB free where the engine keeps its data; a build needs up to "
                f"{need / 1e9:.0f} GB\nFree some (docker image prune; docker builder prune), or put "
                "the private engine elsewhere with TRAINYARD_ENGINE_ROOT"
            )

    def _prune(self, kind: str, descriptions: tuple[str, ...]) -> None:
        records = self.client.api.df().get("BuildCache") or ()
        ids = [
            record["ID"]
            for record in records
            if record["Type"] == kind
            and not record["InUse"]
            and (not descriptions or any(text in record["Description"] for text in descriptions))
        ]
        # One that others build on stays as long as they do, in whatever order they come.
        while ids:
            gone = [one for one in ids if self._prune_record(one)]
            if not gone:
                return
            ids = [one for one in ids if one not in gone]

    def _prune_record(self, record_id: str) -> bool:
        done = self.client.api.prune_builds(filters={"id": record_id}, all=True)  # type: ignore[arg-type]
        return bool(done.get("CachesDeleted"))

    @contextlib.contextmanager
    def exclusive(self, name: str, say: Say = silent) -> Iterator[None]:
        """Let only one process on this host work on ``name`` with this engine at a time."""
        folder = Path(tempfile.gettempdir(), f"trainyard-locks-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        key = hashlib.sha256(f"{self.host} {name}".encode()).hexdigest()[:16]
        with (folder / f"{key}.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{name}: another trainyard is at work on it; waiting")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def build(self, request: BuildRequest, on_step: Callable[[str], None] = lambda _: None) -> str:
        """Build and return the image id ("" for ``unpack_to``).

        ``on_step`` hears the name of each step as it starts.  Nothing is tagged unless the build
        succeeds.  Raises StepFailed with the failing step and the end of its output.  On
        KeyboardInterrupt the build is cancelled in the engine before the exception goes on.
        """
        request.log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
            iid = Path(folder, "iid")
            process = subprocess.Popen(
                self._build_command(request, iid),
                env=self.environment | {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "rawjson"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches us first, and we cancel in order
            )
            assert process.stderr is not None
            try:
                with request.log.open("w") as log:
                    story = Story(log, on_step)
                    for line in process.stderr:
                        story.hear(line)
                code = process.wait()
            except BaseException:
                _cancel(process)
                raise
            if code:
                if not self.answers():
                    raise StepFailed(
                        f"the engine at {self.host} went away during the build\n"
                        "The same command goes on from here."
                    )
                raise StepFailed(f"{story.failure()}\nThe whole log: {request.log}")
            return iid.read_text() if iid.exists() else ""

    def _build_command(self, request: BuildRequest, iid: Path) -> list[str]:
        # If we are killed with -9 the client must not go on building: the kernel ends it.
        guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command = [*guard, self.docker, "buildx", "build", "--progress", "rawjson"]
        command += ["--file", str(request.dockerfile)]
        if not request.unpack_to:
            command += ["--iidfile", str(iid), "--load", "--provenance=false"]
        else:
            command += ["--output", f"type=local,dest={request.unpack_to}"]
        for option, pairs in (("--build-arg", request.args), ("--label", request.labels)):
            command += [word for name, value in pairs.items() for word in (option, f"{name}={value}")]
        # By name only: a proxy's address can hold a password, and others can read our arguments.
        # BuildKit keeps these out of the image's history and of its cache keys:
        # https://docs.docker.com/build/building/variables/#pre-defined-build-arguments
        command += [word for name in PROXY_VARIABLES if name in os.environ for word in ("--build-arg", name)]
        for name, path in request.secrets.items():
            command += ["--secret", f"id={name},src={path}"]
        for name, path in request.contexts.items():
            command += ["--build-context", f"{name}={path}"]
        if request.platform:
            command += ["--platform", request.platform]
        if request.target:
            command += ["--target", request.target]
        if request.tag:
            command += ["--tag", request.tag]
        return [*command, str(request.context)]


def connect(say: Say = silent) -> Engine:
    """Find an engine, or start the private one.

    Raises InputError where there is none and none can be started.
    """
    address = daemon.ensure(say)
    try:
        return Engine(address)
    except DockerException as error:
        raise StepFailed(f"the engine at {address.host} does not answer: {error}") from error


class Story:
    """BuildKit's progress, told as a plain log file and kept for a failure message.

    The format is that of ``docker buildx build --progress=rawjson``: one SolveStatus a line,
    https://github.com/moby/buildkit/blob/master/client/graph.go.
    """

    def __init__(self, log: IO[str], on_step: Callable[[str], None]) -> None:
        self._log = log
        self._on_step = on_step
        self._names: dict[str, str] = {}
        self._started: set[str] = set()
        self._tails: dict[str, deque[str]] = {}
        self._partial: dict[str, str] = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._failed: tuple[str, str] | None = None
        self._spread: list[str] = []
        self._other: deque[str] = deque(maxlen=TAIL_LINES)

    def hear(self, line: str) -> None:
        """Take one line of the client's output.

        buildx 0.13 spreads each status over many lines, from a bare ``{`` to a bare ``}``; later
        ones print it on one.
        """
        if self._spread or line.rstrip() == "{":
            self._spread.append(line)
            if line.rstrip() != "}":
                return
            line = "".join(self._spread)
            self._spread.clear()
        try:
            status = json.loads(line)
        except ValueError:
            self._other.append(line.rstrip())
            self._log.write(line)
            return
        if not isinstance(status, dict):
            return
        vertexes = status.get("vertexes") or ()
        for vertex in vertexes:
            self._vertex(vertex)
        for entry in status.get("logs") or ():
            self._output(entry["vertex"], base64.b64decode(entry["data"]))
        for vertex in vertexes:
            if vertex.get("completed") and (rest := self._partial.pop(vertex["digest"], "")):
                self._line(vertex["digest"], rest)
        self._log.flush()

    def _vertex(self, vertex: dict[str, Any]) -> None:
        digest, name = vertex["digest"], " ".join(vertex["name"].split())
        self._names[digest] = name
        if vertex.get("started") and digest not in self._started:
            self._started.add(digest)
            self._log.write(f"==> {name}{' (cached)' if vertex.get('cached') else ''}\n")
            if name.startswith("[") and not name.startswith("[internal]") and not vertex.get("cached"):
                self._on_step(name)
        if vertex.get("error") and not self._failed and "canceled" not in vertex["error"]:
            self._failed = (digest, vertex["error"])

    def _output(self, digest: str, data: bytes) -> None:
        # A chunk may end within a line, and within a character.
        text = self._decoders.setdefault(digest, UTF_8(errors="replace")).decode(data)
        *lines, self._partial[digest] = (self._partial.get(digest, "") + text).split("\n")
        for line in lines:
            self._line(digest, line)

    def _line(self, digest: str, line: str) -> None:
        clean = _last_state(line)
        self._tails.setdefault(digest, deque(maxlen=TAIL_LINES * 40)).append(clean)
        self._log.write(f"    {clean}\n")
        if found := COMPILING.search(clean):
            self._on_step(f"compiling {found[1]}")

    def failure(self) -> str:
        """Say what broke: our own verdict where a script gave one, else the end of the output."""
        if not self._failed:
            return "\n".join(self._other) or "the build ended without a word"
        digest, error = self._failed
        tail = [*self._tails.get(digest, ()), _last_state(self._partial.get(digest, ""))]
        verdicts = [line for line in tail if "kernels: FAILED: " in line]
        if verdicts:
            return "kernels: " + str(verdicts[-1]).split("kernels: FAILED: ", 1)[1]
        shown = "\n".join(line for line in tail[-TAIL_LINES:] if line.strip())
        return f"{self._names[digest][:200]}\n{shown}\n{error.splitlines()[-1][:500]}"


def _last_state(line: str) -> str:
    """A progress bar writes its line again and again; what it wrote last is the line."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def _cancel(process: subprocess.Popen[str]) -> None:
    """End a build: ask, wait, insist.  BuildKit stops its containers when the client leaves."""
    for number, seconds in ((signal.SIGINT, CANCEL_GRACE), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
