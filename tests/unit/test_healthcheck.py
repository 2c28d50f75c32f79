"""The command healthcheck: exit codes, services that answer or do not, JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOTFS = Path(__file__).resolve().parents[2] / "rootfs"
sys.path.insert(0, str(_ROOTFS / "common/opt/trainyard/lib"))

from trainyard_node import checks, deep, facts, healthcheck, services  # noqa: E402


@contextmanager
def server(greeting: bytes) -> Iterator[int]:
    """Something that listens on 127.0.0.1 and says the same to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _address = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_an_sshd_that_answers_is_fine() -> None:
    with server(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        assert services.answers("sshd", str(port), []).severity == "ok"


def test_something_else_on_the_port_of_sshd_is_an_error() -> None:
    with server(b"HTTP/1.1 400 Bad Request\r\n") as port:
        found = services.answers("sshd", str(port), [])
    assert found.severity == "error"
    assert "HTTP/1.1" in found.text


def test_jupyter_needs_only_to_accept() -> None:
    with server(b"") as port:
        assert services.answers("jupyter", str(port), []).severity == "ok"


def test_a_service_that_has_gone_is_an_error_with_a_remedy() -> None:
    port = closed_port()
    found = services.answers("jupyter", str(port), [])
    assert found.severity == "error"
    assert f"jupyter does not answer on port {port}" in found.text
    assert "refused" in found.text
    assert "start-jupyter" in found.remedy


@pytest.mark.parametrize("text", ["", "ssh", "0", "70000"])
def test_a_port_file_that_holds_no_port(text: str) -> None:
    assert services.answers("sshd", text, []).severity == "error"


def test_only_services_that_were_started_are_looked_at(tmp_path: Path) -> None:
    assert services.check(str(tmp_path), []) == []
    (tmp_path / "jupyter.port").write_text(f"{closed_port()}\n")
    assert [found.name for found in services.check(str(tmp_path), [])] == ["jupyter"]


def test_a_port_file_from_before_the_container_started_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sshd.port").write_text("22\n")
    os.utime(tmp_path / "sshd.port", (1000, 1000))
    monkeypatch.setattr(services, "started", lambda: 2000.0)
    assert services.check(str(tmp_path), []) == []


@pytest.mark.parametrize(
    ("env", "uid", "expected"),
    [
        ({}, 0, "/run/trainyard"),
        ({}, 1000, "/tmp/trainyard-1000"),
        ({"TMPDIR": "/scratch"}, 7, "/scratch/trainyard-7"),
        ({"TMPDIR": ""}, 7, "/tmp/trainyard-7"),
    ],
)
def test_where_services_keep_their_state(env: dict[str, str], uid: int, expected: str) -> None:
    assert services.state_folder(env, uid) == expected


# -- the command ---------------------------------------------------------------------------


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[checks.Finding]:
    """What the checks will find; a test fills it."""
    found: list[checks.Finding] = []
    monkeypatch.setattr(checks, "check", lambda _facts: list(found))
    monkeypatch.setattr(services, "check", lambda *_arguments: [])
    return found


OK = checks.ok("shm", "fine")
WARNING = checks.Finding("warning", "home", "HOME is not set", "set it")
ERROR = checks.Finding("error", "cache", "X=/y is not writable", "mount it")


@pytest.mark.parametrize(
    ("found", "options", "code"),
    [
        ([OK], [], 0),
        ([OK, WARNING], [], 0),
        ([OK, WARNING], ["--strict"], 3),
        ([WARNING, ERROR], [], 1),
        ([WARNING, ERROR], ["--strict"], 1),
        ([OK], ["--strict"], 0),
    ],
)
def test_exit_code_by_severity(
    findings: list[checks.Finding], found: list[checks.Finding], options: list[str], code: int
) -> None:
    findings += found
    assert healthcheck.main(options) == code


def test_text_says_what_is_wrong_and_the_remedy(
    findings: list[checks.Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    findings += [OK, WARNING, ERROR]
    healthcheck.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unhealthy: ")
    assert lines[1:] == [
        "warning: HOME is not set. Remedy: set it",
        "error: X=/y is not writable. Remedy: mount it",
    ]


def test_json_holds_everything(findings: list[checks.Finding], capsys: pytest.CaptureFixture[str]) -> None:
    findings += [OK, ERROR]
    assert healthcheck.main(["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "unhealthy"
    assert [finding["name"] for finding in document["findings"]] == ["shm", "cache"]
    assert document["facts"]["hostname"] == socket.gethostname()


@pytest.mark.parametrize("words", [["--nonsense"], ["--timeout"], ["--timeout", "soon"], ["--timeout", "-1"]])
def test_wrong_options_never_end_with_dockers_reserved_code(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert healthcheck.main(words) == 64
    assert capsys.readouterr().err.startswith("healthcheck: ")


def test_the_deep_check_is_added_on_request(
    findings: list[checks.Finding], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings.append(OK)
    asked: list[float] = []

    def collective(_facts: facts.Facts, patience: float) -> checks.Finding:
        asked.append(patience)
        return checks.Finding("error", "collective", "it hangs", "look")

    monkeypatch.setattr(deep, "collective", collective)
    assert healthcheck.main(["--deep", "--timeout", "7"]) == 1
    assert asked == [7.0]
    assert "it hangs" in capsys.readouterr().out


def test_the_end_of_a_failed_collective_is_told_by_its_errors() -> None:
    output = "noise\nRuntimeError: gloo is broken\nChildFailedError: ...\nmore noise\n"
    assert deep.last_lines(output) == ": RuntimeError: gloo is broken"
    assert deep.last_lines("only this\n") == ": only this"
    assert deep.last_lines("") == ""


def test_a_deep_check_that_cannot_run_is_an_error_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    found = deep.collective(facts.collect({}), patience=0.3)
    assert found.severity == "error"
    assert "did not end within 0.3 s" in found.text
    python.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2\nexit 1\n")
    found = deep.collective(facts.collect({}), patience=20)
    assert found.severity == "error"
    assert "no torch" in found.text
