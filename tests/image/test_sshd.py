"""ssh into a container and from node to node: who gets in, what a session sees, which wrong input says what.

Two containers on a network of their own, with one cluster key; ssh and sshd are the image's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import Container, Image, Ran
from docker.types import Mount, Ulimit

pytestmark = pytest.mark.only("has_sshd")

CLUSTER_KEY = "/run/secrets/ssh_cluster_key"
HOST_KEY = "/run/trainyard/sshd/ssh_host_ed25519_key.pub"
SECONDS = 30  # for sshd to answer in


# -- keys ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key pair, made by the image's ssh-keygen; the private half lies on this host, to be mounted."""

    path: Path
    private: str
    public: str


def make_key(image: Image, folder: Path, *options: str, passphrase: str = "") -> Key:
    """A new pair: ed25519 unless ``options`` say another."""
    name = f"/tmp/{secrets.token_hex(4)}"
    kind = options or ("-t", "ed25519")
    image.exec(["ssh-keygen", "-q", *kind, "-N", passphrase, "-C", "of a test", "-f", name]).ok()
    private, public = (image.exec(["cat", file]).ok() for file in (name, f"{name}.pub"))
    return Key(file_of(folder, private), private, public.strip())


def file_of(folder: Path, text: str, mode: int = 0o444, owner: int = 0) -> Path:
    """A file on this host, readable for everybody, as mounted secrets are."""
    path = folder / secrets.token_hex(4)
    path.write_text(text)
    path.chmod(mode)
    return path


def at(target: str, source: Path) -> Mount:
    """Mount a file or a folder."""
    return Mount(target, str(source), type="bind", read_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def key(image: Image, folder: Path) -> Key:
    """The cluster's key."""
    return make_key(image, folder)


# -- nodes -----------------------------------------------------------------------------------


@contextmanager
def network(image: Image) -> Iterator[str]:
    """A network of its own; containers find each other by name there."""
    name = f"trainyard-test-{secrets.token_hex(4)}"
    made = image.client.networks.create(name)
    try:
        yield name
    finally:
        made.remove()


@contextmanager
def started(image: Image, port: int = 22, **options: Any) -> Iterator[Container]:
    """A container with the services that its options ask for, once sshd answers."""
    with image.fresh(**({"command": []} | options)) as container:
        wait_for_sshd(container, port)
        yield container


def wait_for_sshd(container: Container, port: int = 22) -> None:
    code = """
import socket, sys, time
while True:
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5) as connection:
            if connection.recv(4) == b"SSH-":
                break
    except OSError:
        time.sleep(0.05)
"""
    done = container.python(code, str(port), timeout=SECONDS)
    assert done.rc == 0, f"sshd does not answer on port {port}: {container.raw.logs().decode()}"


@contextmanager
def two_nodes(
    image: Image, key: Key, port: int = 22, **options: Any
) -> Iterator[tuple[Container, Container]]:
    """Two nodes that share the cluster key, called NAME-1 and NAME-2."""
    with network(image) as name, ExitStack() as stack:
        first, second = (
            stack.enter_context(
                started(image, port, name=f"{name}-{n}", hostname=f"node{n}", network=name,
                        mounts=[at(CLUSTER_KEY, key.path)], **options)
            )
            for n in (1, 2)
        )  # fmt: skip
        yield first, second


def name_of(container: Container) -> str:
    return str(container.raw.name)


def ssh(source: Container, target: Container | str, *command: str, user: str = "root", **options: Any) -> Ran:
    """``ssh TARGET COMMAND`` in a node. Nothing can be asked: a question is a failure."""
    host = target if isinstance(target, str) else name_of(target)
    return source.exec(["ssh", "-o", "BatchMode=yes", host, *command], user=user, **options)


# What the nodes are started with: what sessions must see, and what they must not.
SEEN = {
    "NCCL_DEBUG": "VERSION",
    "NCCL_SOCKET_IFNAME": "^lo,docker",
    "CUDA_HOME": "/usr/local/cuda",
    "LD_LIBRARY_PATH": "/opt/a:/opt/b",
    "TRAINYARD_TEST": "1",
    "HF_HOME": "/data/hf",
    "OMP_NUM_THREADS": "3",
    "PYTHONWARNINGS": "",
    "LC_TIME": "C",
    "MY_QUOTES": "a \"b\" 'c' \\d\\\\ $HOME #e `f` \\",
    "MY_BLANKS": "  two  and\ta tab ",
    "MY_PASSWORD": "asked for by name",
}
NOT_SEEN = {
    "SSH_ENV": "MY_QUOTES MY_BLANKS,MY_PASSWORD MY_LINES",
    "MY_LINES": "line\nbreak",  # sshd_config cannot hold it
    "HF_TOKEN": "not-for-sessions-1",
    "WANDB_API_KEY": "not-for-sessions-2",
    "AWS_SECRET_ACCESS_KEY": "not-for-sessions-3",
    "NCCL_TOKEN": "not-for-sessions-4",
    "SSH_AUTHORIZED_KEYS": "# none",
    "RANK": "7",
    "MY_OWN": "not-for-sessions-5",
}
MEMLOCK, NOFILE = 4 * 1024 * 1024, 1000  # below what an engine may have itself


@pytest.fixture(scope="module")
def nodes(image: Image, key: Key) -> Iterator[tuple[Container, Container]]:
    """Two nodes as Docker starts them: root, sshd on port 22."""
    limits = [
        Ulimit(name="memlock", soft=MEMLOCK, hard=MEMLOCK),
        Ulimit(name="nofile", soft=NOFILE, hard=NOFILE),
    ]
    with two_nodes(image, key, environment={**SEEN, **NOT_SEEN}, ulimits=limits) as pair:
        yield pair


Nodes = tuple[Container, Container]


# -- from node to node -----------------------------------------------------------------------


@pytest.mark.parametrize("user", ["root", "trainyard"])
def test_nodes_reach_each_other(nodes: Nodes, user: str) -> None:
    """No known_hosts to collect, no question, no password; as root and as the image's user."""
    for source, target in (nodes, nodes[::-1]):
        done = ssh(source, target, "hostname; id -un", user=user)
        assert done.ok().split() == [target.exec("hostname").ok().strip(), "trainyard"]
        assert done.err == ""


def test_a_node_reaches_itself(nodes: Nodes) -> None:
    assert ssh(nodes[0], "localhost", "hostname").ok().strip() == "node1"
    assert ssh(nodes[0], nodes[0], "hostname").ok().strip() == "node1"


def test_files_are_copied(nodes: Nodes) -> None:
    first, second = nodes
    first.put("content\n", "/tmp/to-copy")
    first.exec(["scp", "-q", "/tmp/to-copy", f"{name_of(second)}:copied"]).ok()
    assert second.exec(["cat", "/home/trainyard/copied"]).ok() == "content\n"


def test_a_session_imports_what_the_image_holds(image: Image, nodes: Nodes) -> None:
    modules = "torch, deepspeed" if image.row.has_deepspeed else "torch"
    code = f"'import {modules}; print(torch.__version__)'"
    done = ssh(*nodes, f"python -c {code}", timeout=240)
    assert done.ok().split()[-1].partition("+")[0] == image.row.torch.version


def test_another_hosts_key_is_refused(image: Image, nodes: Nodes, key: Key) -> None:
    """A host without the cluster's signature, which would even let the key in."""
    first, _ = nodes
    network = next(iter(first.raw.attrs["NetworkSettings"]["Networks"]))
    stranger = {"SSH_AUTHORIZED_KEYS": key.public}
    with started(image, network=network, name=f"{network}-3", environment=stranger) as other:
        done = ssh(first, other, "true")
        assert done.rc == 255
        assert "Host key verification failed" in done.err
        lax = ["ssh", "-o", "StrictHostKeyChecking=no", name_of(other), "hostname"]
        assert first.exec(lax).ok() == other.exec("hostname").ok()


def test_host_keys_differ_and_outlive_a_restart(image: Image, key: Key) -> None:
    with two_nodes(image, key) as (first, second):
        before = [node.exec(["cat", HOST_KEY]).ok() for node in (first, second)]
        assert before[0] != before[1]
        second.raw.restart(timeout=10)
        wait_for_sshd(second)
        assert second.exec(["cat", HOST_KEY]).ok() == before[1]
        assert ssh(first, second, "hostname").ok().strip() == "node2"


def test_the_images_user_runs_sshd_too(image: Image, key: Key) -> None:
    """Non-root: another port, which the client follows."""
    with two_nodes(image, key, port=2222, user="1000:1000") as (first, second):
        done = ssh(first, second, "hostname; id -u", user="1000:1000")
        assert done.ok().split() == ["node2", "1000"]
        assert first.exec("cat /tmp/trainyard-1000/sshd.port").ok() == "2222\n"
        first.put("content\n", "/tmp/to-copy")
        first.exec(["scp", "-q", "/tmp/to-copy", f"{name_of(second)}:/tmp/copied"]).ok()
        assert second.exec("cat /tmp/copied").ok() == "content\n"
        # users have their own configuration, which goes first, and the image's comes last
        first.exec(
            "mkdir -m 700 ~/.ssh && echo 'Host *.org\nPort 23' > ~/.ssh/config && chmod 600 ~/.ssh/config"
        )
        asked = first.exec("ssh -G example.org").ok().splitlines()
        assert {"port 23", "hashknownhosts yes"} <= set(asked)
        # another user of that container is not disturbed
        assert "port 22" in first.exec("ssh -G example.org", user="root").ok().splitlines()


def test_a_users_sshd_has_its_port_and_folder(image: Image, key: Key) -> None:
    given = {"SSH_PORT": "2345", "TMPDIR": "/home/trainyard"}
    with two_nodes(image, key, port=2345, user="1000:1000", environment=given) as (first, second):
        assert ssh(first, second, "hostname", user="").ok().strip() == "node2"
        assert first.exec("cat /home/trainyard/trainyard-1000/sshd.port").ok() == "2345\n"


def test_the_client_follows_the_port(image: Image, key: Key) -> None:
    with two_nodes(image, key, port=2345, environment={"SSH_PORT": "2345"}) as (first, second):
        assert ssh(first, second, "hostname").ok().strip() == "node2"
        assert first.exec("cat /run/trainyard/sshd.port").ok() == "2345\n"


def test_hosts_outside_the_cluster_can_be_left_alone(image: Image, key: Key) -> None:
    chosen = {"SSH_PORT": "2345", "SSH_CLUSTER_HOSTS": "trainyard-* 10.*"}
    with two_nodes(image, key, port=2345, environment=chosen) as (first, second):
        assert ssh(first, second, "hostname").ok().strip() == "node2"
        asked = first.exec("ssh -G example.org").ok().splitlines()
        assert {"port 22", "user root"} <= set(asked)
        assert "stricthostkeychecking true" not in asked


def test_everything_works_with_a_read_only_root(image: Image, key: Key) -> None:
    options: dict[str, Any] = {"read_only": True, "tmpfs": {"/tmp": "", "/run": ""}}
    with two_nodes(image, key, **options) as (first, second):
        for user in ("root", "trainyard"):
            assert ssh(first, second, "hostname", user=user).ok().strip() == "node2"


@pytest.mark.parametrize("change", ["\r\n", "no line break at the end"])
def test_keys_survive_what_editors_do_to_them(image: Image, folder: Path, key: Key, change: str) -> None:
    text = key.private.replace("\n", "\r\n") if change == "\r\n" else key.private.rstrip()
    path = folder / "changed"
    path.unlink(missing_ok=True)
    path.write_bytes(text.encode())
    path.chmod(0o444)
    with started(image, mounts=[at(CLUSTER_KEY, path)]) as node:
        ssh(node, "localhost", "true").ok()


# -- what a session sees ---------------------------------------------------------------------

# How ssh can be used; each writes its environment to a file, in which no prompt gets mixed up.
SESSIONS = {
    "command": ([], "env -0 > /tmp/seen", ""),
    "command, login shell": ([], "bash -lc 'env -0 > /tmp/seen'", ""),
    "shell": ([], "", "env -0 > /tmp/seen"),
    "terminal": (["-tt"], "", "env -0 > /tmp/seen; exit\n"),
    "terminal, command": (["-tt"], "bash -ic 'env -0 > /tmp/seen'", ""),
}
OF_A_SESSION = {"USER", "LOGNAME", "SHELL", "MAIL", "PWD", "SHLVL", "_", "SSH_CLIENT", "SSH_CONNECTION"}
OF_A_TERMINAL = {"SSH_TTY", "TERM", "LS_COLORS"}


def variables(env: str) -> dict[str, str]:
    """What ``env -0`` printed."""
    return dict(entry.split("=", 1) for entry in env.split("\0") if "=" in entry)


@pytest.mark.parametrize("how", SESSIONS)
def test_a_session_sees_the_environment_that_docker_exec_sees(image: Image, nodes: Nodes, how: str) -> None:
    first, second = nodes
    options, command, typed = SESSIONS[how]
    second.exec("rm -f /tmp/seen").ok()
    call = ["ssh", "-o", "BatchMode=yes", *options, name_of(second), *([command] if command else [])]
    first.exec(["sh", "-c", 'typed=$1; shift; printf %s "$typed" | "$@"', "sh", typed, *call]).ok()
    session = variables(second.exec("cat /tmp/seen").ok())
    there = variables(second.exec(["env", "-0"]).ok())

    expected_only_there = {"HOSTNAME", *NOT_SEEN}
    only_there, only_session = there.keys() - session.keys(), session.keys() - there.keys()
    differ = {name for name in there.keys() & session.keys() if there[name] != session[name]}
    image.note(
        f"ssh ({how}) against docker exec: only in docker exec {sorted(only_there)}; only in ssh"
        f" {sorted(only_session)}; different {sorted(differ)}"
    )
    assert only_there == expected_only_there
    assert only_session <= OF_A_SESSION | (OF_A_TERMINAL if "terminal" in how else set())
    assert differ == {"HOME"}
    assert session["HOME"] == "/home/trainyard"
    assert {name: session[name] for name in SEEN} == SEEN
    assert {name: session.get(name) for name in image.env} == image.env


def test_a_line_break_in_a_value_is_told(nodes: Nodes) -> None:
    assert "MY_LINES has a line break" in nodes[0].raw.logs().decode()


def test_a_session_has_the_containers_limits(nodes: Nodes) -> None:
    first, second = nodes
    asked = "ulimit -l; ulimit -n; ulimit -Hl; ulimit -Hn"
    there = second.exec(["bash", "-c", asked]).ok()
    assert there.split() == [str(MEMLOCK // 1024), str(NOFILE)] * 2
    assert ssh(first, second, asked).ok() == there
    assert ssh(first, second, f"bash -lc '{asked}'").ok() == there


def test_a_session_cannot_read_what_root_was_started_with(nodes: Nodes) -> None:
    """Neither from /proc, nor from sshd's files."""
    first, second = nodes
    search = "cat /proc/[0-9]*/environ 2>/dev/null; cat /run/trainyard/*/* 2>/dev/null"
    found = ssh(first, second, search).out
    assert "TRAINYARD_IMAGE" in found, "it did read its own"
    assert "not-for-sessions" not in found
    assert "not-for-sessions" not in second.exec("cat /run/trainyard/sshd/sshd_config").ok()


def test_what_is_secret_is_not_in_the_log(nodes: Nodes, key: Key) -> None:
    log = nodes[1].raw.logs().decode()
    assert "not-for-sessions" not in log
    assert key.private.splitlines()[1] not in log


# -- who gets in -----------------------------------------------------------------------------


def test_only_keys_are_accepted(nodes: Nodes) -> None:
    first, second = nodes
    asked = ["-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=password,keyboard-interactive"]
    done = first.exec(["ssh", *asked, name_of(second), "true"])
    assert done.rc == 255
    assert "Permission denied (publickey)." in done.err  # all that it offers
    settings = second.exec("/usr/sbin/sshd -T -f /run/trainyard/sshd/sshd_config").ok().splitlines()
    for line in ("passwordauthentication no", "kbdinteractiveauthentication no", "permitrootlogin no",
                 "usepam no", "authenticationmethods publickey", "permituserenvironment no"):  # fmt: skip
        assert line in settings
    assert not [line for line in settings if line.startswith("acceptenv")]


def test_another_key_is_refused(image: Image, nodes: Nodes, folder: Path) -> None:
    first, second = nodes
    other = make_key(image, folder)
    first.put(other.private, "/tmp/other")
    first.exec("chmod 600 /tmp/other").ok()
    only = ["-F", "none", "-i", "/tmp/other", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]
    done = first.exec(["ssh", *only, f"trainyard@{name_of(second)}", "true"])
    assert done.rc == 255
    assert "Permission denied (publickey)." in done.err


def test_root_gets_in_only_where_asked(image: Image, nodes: Nodes, key: Key) -> None:
    refused = ssh(nodes[0], f"root@{name_of(nodes[1])}", "true")
    assert refused.rc == 255
    assert "Permission denied (publickey)." in refused.err
    with two_nodes(image, key, environment={"SSH_PERMIT_ROOT": "yes"}) as (first, second):
        assert ssh(first, second, "id -u").ok().strip() == "0"
        assert ssh(first, second, "id -un", user="trainyard").ok().strip() == "trainyard"


def test_keys_come_from_text_file_and_folder(image: Image, folder: Path) -> None:
    """Three keys, three ways; comments, options and blank lines between them."""
    text, file, last = (make_key(image, folder, *kind) for kind in ((), ("-t", "ecdsa"), ("-t", "rsa")))
    keys = folder / "keys"
    keys.mkdir(exist_ok=True)
    (keys / "a.pub").write_text(f"# a comment\n\n{last.public}\r\n")
    (keys / "ignored.txt").write_text("no key\n")
    restricted = f'from="127.0.0.1,::1",command="echo \\"forced\\"" {text.public}'
    options: dict[str, Any] = {
        "environment": {"SSH_AUTHORIZED_KEYS": restricted, "SSH_AUTHORIZED_KEYS_FILE": "/keys"}
    }
    with started(image, mounts=[at("/keys", keys)], **options) as node:
        assert login(node, text) == "forced"
        assert login(node, last) == "trainyard"
    with started(
        image, mounts=[at("/run/secrets/ssh_authorized_keys", file_of(folder, file.public))]
    ) as node:
        assert login(node, file) == "trainyard"


def login(node: Container, key: Key) -> str:
    """Log in with a key; returns what ``id -un`` says there."""
    node.put(key.private, "/tmp/identity")
    node.exec("chmod 600 /tmp/identity").ok()
    only = ["-F", "none", "-i", "/tmp/identity", "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]
    return node.exec(["ssh", "-q", *only, "trainyard@127.0.0.1", "id -un"]).ok().strip()


# -- past the entrypoint ---------------------------------------------------------------------


def test_sshd_starts_in_a_running_container(image: Image, key: Key) -> None:
    """``docker exec ... start-sshd --background`` returns when the port answers."""
    with image.fresh(mounts=[at(CLUSTER_KEY, key.path)], entrypoint=[]) as container:
        done = container.exec(["start-sshd", "--background"], env={"NCCL_DEBUG": "INFO"}, timeout=20)
        done.ok()
        assert ssh(container, "localhost", "echo $NCCL_DEBUG").ok().strip() == "INFO"
        again = container.exec(["start-sshd", "--background"], timeout=20)
        assert again.rc == 2
        assert "port 22 is taken" in again.err
        ssh(container, "localhost", "true").ok()  # the running one is not harmed


def test_sshd_starts_as_a_kubernetes_command(image: Image, key: Key) -> None:
    with started(image, mounts=[at(CLUSTER_KEY, key.path)], entrypoint=["start-sshd"]) as container:
        there = container.exec("echo $PATH").ok()
        assert ssh(container, "localhost", "echo $PATH").ok() == there


# -- nobody configures another user's ssh ------------------------------------------------------


@pytest.mark.parametrize(
    "trap",
    [
        "mkdir -p /tmp/trainyard-1000/ssh && echo 'Port 999' > /tmp/trainyard-1000/ssh/config",
        "mkdir -p /tmp/mine/ssh && echo 'Port 999' > /tmp/mine/ssh/config && ln -s mine /tmp/trainyard-1000",
        "ln -s /home/trainyard /tmp/trainyard-1000",
        "mkdir -p /run/trainyard/ssh && echo 'Port 999' > /run/trainyard/ssh/config",
    ],
)
def test_a_folder_of_another_user_is_not_used(image: Image, key: Key, trap: str) -> None:
    """/tmp, and /run where it is a volume, may be open to everybody."""
    with image.fresh(mounts=[at("/cluster_key", key.path)]) as container:
        container.exec("chmod 1777 /run").ok()
        container.exec(trap, user="12345:12345").ok()
        for user in ("root", "trainyard"):
            done = container.exec("ssh -G example.org", user=user)
            assert "port 22" in done.out.splitlines() or "Bad owner or permissions" in done.err
            assert "999" not in done.out
        user = "root" if "/run" in trap else "trainyard"
        done = container.exec(
            "start-sshd", user=user, env={"SSH_CLUSTER_KEY_FILE": "/cluster_key"}, timeout=9
        )
        assert done.rc == 2, done
        assert "its owner is uid 12345" in done.err


# -- wrong input -----------------------------------------------------------------------------


def refused(
    image: Image, environment: Mapping[str, str], *mounts: Mount, user: str = "root", **options: Any
) -> str:
    """Start sshd with wrong input; returns the one message."""
    done = image.run_new(
        ["start-sshd"], environment=dict(environment), mounts=list(mounts), user=user, timeout=20, **options
    )
    assert done.rc == 2, done
    assert done.out == ""
    (message,) = done.err.splitlines()
    assert message.startswith("start-sshd: ")
    return message


def test_without_keys_it_says_how_to_give_them(image: Image) -> None:
    for environment in ({}, {"SSH_AUTHORIZED_KEYS": ""}, {"SSH_AUTHORIZED_KEYS": "# nothing\n\n"}):
        message = refused(image, environment)
        for word in ("SSH_AUTHORIZED_KEYS", "SSH_AUTHORIZED_KEYS_FILE", "SSH_CLUSTER_KEY_FILE"):
            assert word in message


@pytest.mark.parametrize("environment", [{"SERVICES": "sshd"}, {"SSH_AUTHORIZED_KEYS": ""}])
def test_the_entrypoint_passes_the_message_on(image: Image, environment: dict[str, str]) -> None:
    with image.fresh(command=[], environment=environment) as container:
        assert container.raw.wait(timeout=SECONDS)["StatusCode"] == 2
        assert "no keys were given" in container.raw.logs().decode()


def test_a_wrong_key_line_is_named(image: Image, folder: Path, key: Key) -> None:
    message = refused(image, {"SSH_AUTHORIZED_KEYS": f"{key.public}\n\nssh-ed25519 cut\n"})
    assert "SSH_AUTHORIZED_KEYS, line 3 is not a public key" in message
    assert "TYPE BASE64" in message
    keys = {"SSH_AUTHORIZED_KEYS_FILE": "/keys"}
    assert "/keys, line 1" in refused(image, keys, at("/keys", file_of(folder, "hello\n")))
    known_hosts = f"node1 {key.public}"
    assert "'node1' before the key is no option" in refused(image, {"SSH_AUTHORIZED_KEYS": known_hosts})


def test_a_private_key_for_a_public_one_is_told(image: Image, key: Key) -> None:
    message = refused(image, {"SSH_AUTHORIZED_KEYS": key.private})
    assert "line 1 begins a PRIVATE key" in message
    assert ".pub" in message
    assert key.private.splitlines()[1][:16] not in message


def test_a_cluster_key_that_cannot_be_used_is_told(image: Image, folder: Path, key: Key) -> None:
    def told(text: str) -> str:
        return refused(image, {}, at(CLUSTER_KEY, file_of(folder, text)))

    assert "is a PUBLIC key" in told(key.public)
    assert "is no private key" in told("")
    assert "cut short" in told("\n".join([*key.private.splitlines()[:2], *key.private.splitlines()[-1:]]))
    assert "passphrase" in told(make_key(image, folder, passphrase="x" * 8).private)


def test_a_file_that_cannot_be_read_is_told(image: Image, folder: Path, key: Key) -> None:
    assert "/nowhere (SSH_AUTHORIZED_KEYS_FILE)" in refused(image, {"SSH_AUTHORIZED_KEYS_FILE": "/nowhere"})
    assert "/nowhere (SSH_CLUSTER_KEY_FILE)" in refused(image, {"SSH_CLUSTER_KEY_FILE": "/nowhere"})
    roots_only = at(CLUSTER_KEY, file_of(folder, key.private, mode=0o400))
    message = refused(image, {}, roots_only, user="1000:1000")
    assert "uid 1000 can read it" in message
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    assert "no *.pub file" in refused(image, {"SSH_AUTHORIZED_KEYS_FILE": "/keys"}, at("/keys", empty))


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SSH_PORT": "ssh"}, "a number from 1 to 65535"),
        ({"SSH_PORT": "65536"}, "a number from 1 to 65535"),
        ({"SSH_PERMIT_ROOT": "1"}, "neither yes nor no"),
        ({"SSH_ENV": "A=1"}, "give names only"),
        ({"SSH_ENV": "HOME"}, "HOME is set by each session itself"),
        ({"SSH_CLUSTER_HOSTS": "a;b"}, "host pattern"),
    ],
)
def test_a_wrong_setting_is_told(image: Image, key: Key, environment: dict[str, str], told: str) -> None:
    message = refused(image, {**environment, "SSH_AUTHORIZED_KEYS": key.public})
    assert told in message
    assert next(iter(environment)) in message


def test_a_port_that_cannot_be_had_is_told(image: Image, key: Key) -> None:
    keys = {"SSH_AUTHORIZED_KEYS": key.public}
    listener = (
        "import socket, time; s = socket.create_server(('', 22)); print('up', flush=True); time.sleep(60)"
    )
    with image.fresh(environment=keys) as container:
        container.exec(["sh", "-c", 'python -c "$1" & sleep 1', "sh", listener])
        done = container.exec("start-sshd", timeout=9)
        assert (done.rc, done.out) == (2, "")
        assert "port 22 is taken" in done.err
        assert "SSH_PORT" in done.err
    low = {**keys, "SSH_PORT": "22"}
    closed = {"net.ipv4.ip_unprivileged_port_start": "1024"}  # as with --network host
    message = refused(image, low, user="1000:1000", sysctls=closed)
    assert "uid 1000 may not use port 22" in message
    assert "1024" in message


def test_a_user_that_cannot_log_in_is_told(image: Image, key: Key) -> None:
    keys = {"SSH_AUTHORIZED_KEYS": key.public}
    message = refused(image, keys, user="12345:12345")
    assert "uid 12345 has no user name" in message
    assert "uid 1000 (trainyard)" in message
    assert "nologin" in refused(image, keys, user="65534:65534")
    with_root = {**keys, "SSH_PERMIT_ROOT": "yes"}
    assert "cannot log root in" in refused(image, with_root, user="1000:1000")


def test_a_folder_that_cannot_be_made_is_told(image: Image, key: Key) -> None:
    keys = {"SSH_AUTHORIZED_KEYS": key.public}
    assert "--tmpfs /run" in refused(image, keys, read_only=True)
    assert "--tmpfs /tmp" in refused(image, keys, read_only=True, user="1000:1000")


def test_help_names_every_setting(image: Image) -> None:
    text = image.exec(["start-sshd", "--help"]).ok()
    for name in ("SSH_AUTHORIZED_KEYS", "SSH_AUTHORIZED_KEYS_FILE", "SSH_CLUSTER_KEY_FILE", "SSH_PORT",
                 "SSH_PERMIT_ROOT", "SSH_ENV", "SSH_CLUSTER_HOSTS"):  # fmt: skip
        assert name in text
