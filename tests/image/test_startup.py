"""What starting an image does: any command untouched, or services, or a shell, or a hint."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from containers import Container, Image, Ran

ENTRYPOINT = "/usr/local/bin/entrypoint"
SECONDS = 60  # for a container that ends by itself
PATIENCE = 9.5  # `docker stop` kills after 10 seconds; whatever needs it was not ended


# -- helpers -------------------------------------------------------------------------------


def without_command(image: Image, **options: Any) -> Ran:
    """``docker run IMAGE``, with nothing on standard input."""
    with image.fresh(command=[], **options) as container:
        return ended(container)


def ended(container: Container) -> Ran:
    """Wait for a container's own end."""
    code = int(container.raw.wait(timeout=SECONDS)["StatusCode"])
    out, err = (
        container.raw.logs(stdout=stdout, stderr=not stdout).decode(errors="replace")
        for stdout in (True, False)
    )
    return Ran("docker run", code, out, err)


def stop(container: Container) -> tuple[float, int]:
    """``docker stop``: how many seconds it took, and the container's exit code."""
    before = time.monotonic()
    container.raw.stop(timeout=10)
    seconds = time.monotonic() - before
    container.raw.reload()
    return seconds, int(container.raw.attrs["State"]["ExitCode"])


@contextmanager
def starting(image: Image, until: str, **options: Any) -> Iterator[Container]:
    """A container that has written ``until`` to its log."""
    with image.fresh(**options) as container:
        deadline = time.monotonic() + SECONDS
        while until not in (log := container.raw.logs().decode(errors="replace")):
            assert time.monotonic() < deadline, f"never said {until!r}:\n{log}"
            time.sleep(0.1)
        yield container


def variables(env: str) -> dict[str, str]:
    """What ``env -0`` printed."""
    return dict(entry.split("=", 1) for entry in env.split("\0") if "=" in entry)


# -- a command -------------------------------------------------------------------------------


def test_arguments_arrive_as_they_were_given(image: Image) -> None:
    given = ["a b", "*", "$HOME", "", "-x", "--", 'quo"te', "back\\slash", "line\nbreak"]
    done = image.run_new(["python", "-c", "import sys; print(sys.argv[1:])", *given])
    assert done.ok().strip() == repr(given)


def test_the_environment_is_the_one_that_was_given(image: Image) -> None:
    """Also variables whose names no shell could have; a shell's own three may come on top."""
    given = {"PLAIN": "1", "odd-name.x": "2", "SPACES": " a  b "}
    through = variables(image.run_new(["env", "-0"], environment=given).ok())
    past = variables(image.run_new(["env", "-0"], environment=given, entrypoint=[]).ok())
    for name in ("HOSTNAME", "PWD", "SHLVL", "_"):  # the container's, and the shell's
        through.pop(name, None)
        past.pop(name, None)
    assert through == past
    assert given.items() <= through.items()


@pytest.mark.parametrize("command", ["-version", "no-such-program"])
def test_a_command_that_is_not_there_is_named(image: Image, command: str) -> None:
    with image.fresh(command=[command]) as container:
        done = ended(container)
    assert done.rc == 127
    assert command in done.err


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("exit 0", 0), ("kill -KILL $$", 137)])
def test_exit_codes_are_the_commands(image: Image, script: str, code: int) -> None:
    with image.fresh(command=["sh", "-c", script]) as container:
        assert ended(container).rc == code


@pytest.mark.parametrize("user", ["0", "1000:1000", "12345:12345"])
def test_any_user_runs_commands(image: Image, user: str) -> None:
    assert image.run_new(["id", "-u"], user=user).ok().strip() == user.split(":")[0]
    done = without_command(image, user=user, read_only=True)
    assert done.rc == 0, done
    assert "docker run" in done.out


def test_the_entrypoint_costs_next_to_nothing(image: Image) -> None:
    measure = """
import statistics, subprocess, sys, time
def cost(command):
    times = []
    for _ in range(41):
        before = time.perf_counter()
        subprocess.run(command, check=True)
        times.append(time.perf_counter() - before)
    return statistics.median(times)
print(1000 * (cost([sys.argv[1], "/bin/true"]) - cost(["/bin/true"])))
"""
    added = float(image.python(measure, ENTRYPOINT).ok())
    image.note(f"the entrypoint adds {added:.1f} ms to a command")
    assert added < 100


# -- no command ------------------------------------------------------------------------------


def test_without_a_command_and_input_there_is_a_hint(image: Image) -> None:
    done = without_command(image)
    assert done.rc == 0, done
    assert done.err == ""
    assert f"docker run --rm -it trainyard:{image.row.id}" in done.out
    assert ("SSH_AUTHORIZED_KEYS" in done.out) == image.row.has_sshd
    assert ("SERVICES=jupyter" in done.out) == image.row.has_jupyter
    assert len(done.out.splitlines()) < 10


def test_a_script_on_standard_input_is_run(image: Image) -> None:
    """``echo COMMAND | docker run -i IMAGE``."""
    done = subprocess.run(
        ["docker", "run", "--rm", "-i", "--platform", image.row.platform, image.ref],
        input="command -v python\nexit 5\n",
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (5, "/opt/venv/bin/python\n", "")


def test_a_terminal_gets_a_shell(image: Image) -> None:
    with image.fresh(command=[], tty=True, stdin_open=True) as container:
        terminal: Any = container.raw.attach_socket(params={"stdin": 1, "stream": 1})
        terminal._sock.sendall(b"echo in $((40 + 2)) $0; exit 3\n")
        done = ended(container)
        terminal.close()
    assert done.rc == 3
    assert "in 42 bash" in done.out


@pytest.mark.parametrize("services", ["ssh", "jupyter,nothing", "/bin/sh", "*"])
def test_a_service_that_does_not_exist_is_refused(image: Image, services: str) -> None:
    done = without_command(image, environment={"SERVICES": services})
    assert done.rc == 2, done
    (message,) = done.err.splitlines()
    assert "the services are: sshd jupyter" in message or "does not hold" in message


@pytest.mark.only("not has_sshd")
@pytest.mark.parametrize("environment", [{"SERVICES": "sshd"}, {"SSH_AUTHORIZED_KEYS": "x"}])
def test_sshd_is_refused_where_the_image_has_none(image: Image, environment: dict[str, str]) -> None:
    done = without_command(image, environment=environment)
    assert done.rc == 2, done
    (message,) = done.err.splitlines()
    assert "does not hold" in message
    assert "sshd" in message


@pytest.mark.only("not has_jupyter")
def test_jupyter_is_refused_where_the_image_has_none(image: Image) -> None:
    done = without_command(image, environment={"JUPYTER_TOKEN": "x"})
    assert done.rc == 2, done
    (message,) = done.err.splitlines()
    assert "does not hold" in message
    assert "jupyter" in message


def test_no_service_is_a_choice(image: Image) -> None:
    done = without_command(image, environment={"SERVICES": "", "JUPYTER_TOKEN": "x"})
    assert done.rc == 0, done
    assert "Nothing to do" in done.out


# -- services --------------------------------------------------------------------------------

JUPYTER = {"SERVICES": "jupyter", "JUPYTER_TOKEN": "of-a-test"}


@pytest.mark.only("has_jupyter")
def test_services_end_with_docker_stop(image: Image) -> None:
    with starting(image, "JupyterLab: http", command=[], environment=JUPYTER) as container:
        wait_for_port(container, 8888)
        seconds, code = stop(container)
    image.note(f"docker stop of JupyterLab: {seconds:.1f} s, exit code {code}")
    assert seconds < PATIENCE
    assert code == 143


@pytest.mark.only("has_sshd")
@pytest.mark.only("has_jupyter")
def test_when_one_service_cannot_start_the_container_ends(image: Image) -> None:
    """sshd has no keys here."""
    done = without_command(image, environment={**JUPYTER, "SERVICES": "jupyter sshd"})
    assert done.rc == 2, done
    assert "no keys were given" in done.err
    assert "sshd ended with exit code 2" in done.err


@pytest.mark.only("has_sshd")
@pytest.mark.only("has_jupyter")
def test_when_one_service_ends_the_others_are_stopped(image: Image) -> None:
    """In a container that goes on: the end of PID 1 would end them in any case."""
    with image.fresh() as container:
        done = container.exec([ENTRYPOINT], env={**JUPYTER, "SERVICES": "jupyter sshd"}, timeout=30)
        assert done.rc == 2, done
        assert container.exec("grep -lz [j]upyter /proc/[0-9]*/cmdline; true").ok() == ""


@pytest.mark.only("has_jupyter")
def test_when_a_service_dies_the_container_ends_with_its_code(image: Image) -> None:
    with starting(image, "JupyterLab: http", command=[], environment=JUPYTER) as container:
        wait_for_port(container, 8888)
        container.exec("kill -KILL $(grep -lz [j]upyter-lab /proc/[0-9]*/cmdline | cut -d/ -f3)").ok()
        assert ended(container).rc == 137


def wait_for_port(container: Container, port: int) -> None:
    """Until something listens there, in the container."""
    code = """
import socket, sys, time
while True:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5).close()
        break
    except OSError:
        time.sleep(0.1)
"""
    container.python(code, str(port), timeout=SECONDS).ok()


# -- signals and processes -------------------------------------------------------------------

RANKS = """
import os, time, torch.distributed as dist, torch
dist.init_process_group("gloo")
os.write(1, f"rank {dist.get_rank()} is up\\n".encode())  # in one piece
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
"""
DEFUNCT = "grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"


def test_docker_stop_ends_a_job_of_two_ranks(image: Image) -> None:
    launch = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 /tmp/ranks.py"
    script = f"cat > /tmp/ranks.py <<'EOF'\n{RANKS}\nEOF\nexec {launch}"
    with starting(image, "rank 1 is up", command=["bash", "-c", script]) as container:
        assert container.exec(DEFUNCT).ok().strip() == "0"
        seconds, code = stop(container)
    image.note(f"docker stop of two ranks: {seconds:.1f} s, exit code {code}")
    assert seconds < PATIENCE
    assert code not in (0, 137), "137: docker had to kill it"


def test_docker_stop_ends_a_command_that_only_sleeps(image: Image) -> None:
    with image.fresh() as container:
        time.sleep(0.5)
        seconds, code = stop(container)
    assert seconds < 3
    assert code == 143


def test_orphans_do_not_stay_defunct(image: Image) -> None:
    orphan = f"(sh -c 'sleep 0.2' &); sleep 1; {DEFUNCT}"
    assert image.run_new(orphan).ok().strip() == "0"


# -- login shells ----------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash -lc", "sh -lc"])
@pytest.mark.parametrize("user", ["0", "1000:1000", "12345:12345"])
def test_a_login_shell_keeps_the_environment(image: Image, shell: str, user: str) -> None:
    """Debian's /etc/profile sets PATH anew."""
    plain = variables(image.exec(["env", "-0"], user=user).ok())
    login = variables(image.exec([*shell.split(), "env -0"], user=user).ok())
    of_a_shell = {"PWD", "SHLVL", "OLDPWD", "_"}
    assert {n: v for n, v in login.items() if n not in of_a_shell} == plain


def test_a_login_shell_finds_python_though_the_environment_was_wiped(image: Image) -> None:
    done = image.exec(["env", "-i", "bash", "-lc", "command -v python"])
    assert done.ok().strip() == "/opt/venv/bin/python"


def test_a_login_shell_reads_what_debians_reads(image: Image) -> None:
    with image.fresh() as container:
        container.put("export FROM_PROFILE_D=yes\n", "/etc/profile.d/of-a-test.sh")
        assert container.exec(["bash", "-lc", "echo $FROM_PROFILE_D"]).ok().strip() == "yes"
        container.put("FROM_BASHRC=yes\n", "/etc/bash.bashrc")
        assert container.exec(["bash", "-lic", "echo $FROM_BASHRC"]).ok().strip() == "yes"
