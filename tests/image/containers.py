"""The only test module that speaks to Docker: one long-lived container per image.

Times are limited *inside* the container, by GNU ``timeout``: the Docker SDK does not bound how
long it reads from an exec, and a client that gives up leaves the process running.
"""

from __future__ import annotations

import io
import os
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container as DockerContainer
from docker.types import DeviceRequest, Mount

from trainyard.model import Row

LABEL = "trainyard.test"
VENV = "/opt/venv"
TWIN = "/twin"  # where the CPU twin is mounted

Command = str | Sequence[str]


@dataclass(frozen=True, repr=False)
class Ran:
    """A command that ran in a container."""

    command: Command
    rc: int
    out: str
    err: str

    def __repr__(self) -> str:
        return f"<exit code {self.rc}: {self.text[-2000:]}>"

    @property
    def text(self) -> str:
        """Both streams."""
        return f"{self.out}\n{self.err}".strip()

    @property
    def timed_out(self) -> bool:
        """Was it ended by ``timeout``?"""
        return self.rc in (124, 137)

    def ok(self) -> str:
        """Its output; a failure of the test if it ended with another code than 0."""
        __tracebackhide__ = True
        if self.rc:
            end = "\n".join(self.text.splitlines()[-40:])
            why = "ran out of time" if self.timed_out else f"exit code {self.rc}"
            raise AssertionError(f"{why}: {_shown(self.command)}\n{end}")
        return self.out


@dataclass(frozen=True)
class Container:
    """A running container of an image under test."""

    raw: DockerContainer
    patience: int = 1  # what time limits are multiplied by: emulated images need it

    def exec(
        self,
        command: Command,
        *,
        user: str = "",
        env: Mapping[str, str] | None = None,
        timeout: int = 120,
        workdir: str | None = None,
    ) -> Ran:
        """Run a command (a string goes to ``sh -c``) for at most ``timeout`` seconds."""
        done = self.raw.exec_run(
            limited(command, timeout * self.patience),
            user=user,
            environment=dict(env or {}),
            workdir=workdir,
            demux=True,
        )
        streams: Any = done.output  # a pair of bytes or None, as demux asks for
        out, err = (part.decode(errors="replace") if part else "" for part in streams)
        assert done.exit_code is not None
        return Ran(command, done.exit_code, out, err)

    def python(self, code: str, *args: str, **options: Any) -> Ran:
        """Run Python code with the image's interpreter; ``options`` as for :meth:`exec`."""
        return self.exec(["python", "-c", code, *args], **options)

    def put(self, text: str, path: str) -> None:
        """Write a file into the container, for everybody to read."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(Path(path).name)
            member.size, member.mode = len(text.encode()), 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
        assert self.raw.put_archive(str(Path(path).parent), packed.getvalue())

    def fetch(self, path: str, to: Path) -> Path:
        """Copy one file out of the container, into the folder ``to``."""
        chunks, _ = self.raw.get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            content = archive.extractfile(Path(path).name)
            assert content is not None, f"{path} is not a file"
            target = to / Path(path).name
            target.write_bytes(content.read())
        return target


@dataclass(repr=False)
class Image:
    """An image under test and its container; what the ``image`` fixture returns."""

    row: Row
    ref: str
    client: docker.DockerClient
    container: Container
    host: Any  # testinfra's host
    gpus: str  # what --gpus said: "", "all" or a number
    twin: Path | None  # where the CPU twin lies on this host
    notes: list[str] = field(default_factory=list)  # what ran; printed at the end

    def __repr__(self) -> str:
        return f"<image {self.ref}>"

    def exec(self, command: Command, **options: Any) -> Ran:
        """:meth:`Container.exec` in the long-lived container."""
        return self.container.exec(command, **options)

    def python(self, code: str, *args: str, **options: Any) -> Ran:
        """:meth:`Container.python` in the long-lived container."""
        return self.container.python(code, *args, **options)

    @contextmanager
    def fresh(self, **options: Any) -> Iterator[Container]:
        """Another container of the image, with options of the Docker SDK (``network_mode``)."""
        raw = start(self.client, self.ref, self.gpus, self.twin, **options)
        try:
            yield Container(raw, self.container.patience)
        finally:
            raw.remove(force=True, v=True)

    def run_new(self, command: Command, *, timeout: int = 120, **options: Any) -> Ran:
        """``docker run IMAGE command`` in a container of its own, through the entrypoint."""
        timeout *= self.container.patience
        raw = start(
            self.client, self.ref, self.gpus, self.twin, command=limited(command, timeout),
            **options,
        )  # fmt: skip
        try:
            code = int(raw.wait(timeout=timeout + 30)["StatusCode"])
            out = raw.logs(stdout=True, stderr=False).decode(errors="replace")
            err = raw.logs(stdout=False, stderr=True).decode(errors="replace")
            return Ran(command, code, out, err)
        finally:
            raw.remove(force=True, v=True)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The image's configuration, as ``docker inspect`` shows it."""
        config: dict[str, Any] = self.client.images.get(self.ref).attrs["Config"]
        return config

    def layers(self) -> list[Path]:
        """The folder of each layer, lowest first, where the engine keeps layers as folders."""
        driver = self.client.images.get(self.ref).attrs["GraphDriver"]
        data = driver["Data"] or {}
        assert data.get("UpperDir"), f"layers can be read from overlay2 only, this is {driver['Name']}"
        folders = [*reversed(data.get("LowerDir", "").split(":")), data["UpperDir"]]
        return [Path(folder) for folder in folders if folder]

    @cached_property
    def env(self) -> dict[str, str]:
        """The image's ENV."""
        return dict(entry.split("=", 1) for entry in self.config["Env"])

    @cached_property
    def labels(self) -> dict[str, str]:
        """The image's labels."""
        return dict(self.config.get("Labels") or {})

    @cached_property
    def visible_gpus(self) -> int:
        """How many GPUs torch sees in the container."""
        return int(self.python("import torch; print(torch.cuda.device_count())").ok())

    def note(self, text: str) -> None:
        """Say in the summary what ran."""
        self.notes.append(text)


def limited(command: Command, timeout: int) -> list[str]:
    """The command under a time limit; it does not depend on PATH."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    return ["/usr/bin/timeout", "-k", "5", str(timeout), *argv]


def start(
    client: docker.DockerClient, ref: str, gpus: str, twin: Path | None, **options: Any
) -> DockerContainer:
    """Start a container of the image, idle unless ``options`` has a command."""
    if gpus:
        count = -1 if gpus == "all" else int(gpus)
        options["device_requests"] = [DeviceRequest(count=count, capabilities=[["gpu"]])]
    mounts = list(options.pop("mounts", ()))
    if twin is not None:
        mounts.append(Mount(TWIN, str(twin), type="bind", read_only=True))
    settings: dict[str, Any] = {"command": ["sleep", "infinity"], "shm_size": "1g"} | options
    labels = {LABEL: "1"}
    container: DockerContainer = client.containers.run(
        ref, detach=True, labels=labels, mounts=mounts, **settings
    )
    return container


def required_gpus() -> int:
    """``REQUIRE_GPU=n``: fewer visible GPUs than this are a failure."""
    return int(os.environ.get("REQUIRE_GPU") or 0)


def _shown(command: Command) -> str:
    return command if isinstance(command, str) else shlex.join(command)
