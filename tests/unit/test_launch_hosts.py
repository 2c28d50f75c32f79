"""Hostfiles, what hosts answer, and the verdict on a run that failed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

_ROOTFS = Path(__file__).resolve().parents[2] / "rootfs"
sys.path[:0] = [str(_ROOTFS / "common/opt/trainyard/lib"), str(_ROOTFS / "launch/opt/trainyard/lib")]

from trainyard_launch import cli, fleet, hostfile, ssh  # noqa: E402
from trainyard_launch.command import Node, Script  # noqa: E402
from trainyard_launch.errors import LaunchError  # noqa: E402
from trainyard_launch.failure import Failure, Watch, unwrapped  # noqa: E402
from trainyard_node import facts  # noqa: E402

# -- hostfiles -----------------------------------------------------------------------------


def test_a_hostfile_is_read_in_order() -> None:
    text = (
        "# cluster\nnode2 slots=4\n\n  node1   slots=8  # the big one\nroot@10.0.0.3\nfe80::1%eth0 slots=1\n"
    )
    assert hostfile.parse(text, "hosts") == [
        hostfile.Host("node2", 4, 2),
        hostfile.Host("node1", 8, 4),
        hostfile.Host("root@10.0.0.3", None, 5),
        hostfile.Host("fe80::1%eth0", 1, 6),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node1 slot=2", "hosts:1: 'slot=2' is not understood; a line is `host slots=N`"),
        ("node1 slots", "hosts:1: 'slots' is not understood"),
        ("node1 slots=", "hosts:1: slots= is no number"),
        ("node1 slots=0", "hosts:1: slots=0 is no number of ranks"),
        ("node1 slots=-2", "hosts:1: slots=-2 is no number"),
        ("node1 slots=two", "hosts:1: slots=two is no number"),
        ("node1 slots=²", "hosts:1: slots=² is no number"),
        ("node1 slots=2 max_slots=4", "hosts:1: .* has more than a host and its slots"),
        ("node1 slots = 2", "hosts:1: .* has more than a host"),
        ("-oProxyCommand=x slots=2", "hosts:1: '-oProxyCommand=x' is no host name"),
        ("node1;reboot slots=2", "hosts:1: 'node1;reboot' is no host name"),
        ("", "hosts names no host"),
        ("# nothing", "hosts names no host"),
        ("node1 slots=1\nnode2 slots=1\nnode1 slots=1", "hosts:3: node1 is already in line 1"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message) as raised:
        hostfile.parse(line, "hosts")
    assert raised.value.code == 2


def test_all_wrong_lines_are_named_at_once() -> None:
    with pytest.raises(LaunchError) as raised:
        hostfile.parse("a slots=x\nb slots=1\nc d\n", "hosts")
    assert [line.split(": ")[0] for line in str(raised.value).splitlines()] == ["hosts:1", "hosts:3"]


def test_a_hostfile_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="No such file"):
        hostfile.read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="not text"):
        hostfile.read(tmp_path / "binary")


# -- what hosts answer ---------------------------------------------------------------------

FACTS = facts.collect({}, ask_driver=False)._replace(
    image="cpu-pt213",
    contents="a" * 16,
    gpus=0,
    shm_size=2**30,
    memlock=facts.UNLIMITED,
    nofile=65536,
    caches=(),
    home=facts.Folder("HOME", "/root", ""),
    interfaces=(("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("docker0", "172.17.0.1")),
)


def probe(host: str, address: str, **fields: Any) -> fleet.Probe:
    """A host that is fine."""
    changed: dict[str, Any] = {"interfaces": (("lo", "127.0.0.1"), ("eth0", address))}
    changed |= {name: fields.pop(name) for name in list(fields) if name in facts.Facts._fields}
    return fleet.Probe(host, fields.pop("local", False), facts=FACTS._replace(**changed), **fields)


FIRST = probe("node1", "10.0.0.1", local=True, port=29500, other_port=40000)


def problems(
    *probes: fleet.Probe, engine: str = "torchrun", with_checks: bool = True
) -> tuple[list[str], int]:
    """All problems with two ranks on each host."""
    slots = {each.host: 2 for each in probes}
    wrong, _warnings, code = fleet.problems(
        probes, slots, engine=engine, script=Script("train.py"), cwd="/work", with_checks=with_checks
    )
    return wrong, code


def test_hosts_that_are_fine() -> None:
    assert problems(FIRST, probe("node2", "10.0.0.2"))[0] == []


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    wrong, code = problems(
        FIRST,
        fleet.Probe("node2", False, "ssh: connect to host node2 port 22: Connection refused"),
        probe("node3", "10.0.0.3", contents="b" * 16),
        probe("node4", "10.0.0.4", shm_size=16 * 2**20),
        probe("node5", "10.0.0.5", script=False),
        probe("node6", "10.0.0.6", cwd=False, script=False),
    )
    assert [text.split()[0].rstrip(":") for text in wrong] == ["node2", "node3", "node4", "node5", "node6"]
    for text, part in zip(wrong, ("refused", "another image", "16 MB", "train.py", "/work"), strict=True):
        assert part in text
    assert code == 2  # a script that is missing is wrong input


def test_a_host_that_does_not_answer_is_a_failure_and_no_wrong_input() -> None:
    assert problems(FIRST, fleet.Probe("node2", False, "no"))[1] == 1


def test_deepspeed_must_be_on_every_host() -> None:
    other = probe("node2", "10.0.0.2", deepspeed=False)
    assert problems(FIRST, other)[0] == []
    assert "node2: its image has no DeepSpeed" in problems(FIRST, other, engine="deepspeed")[0][0]


def test_gpus_that_deepspeed_would_not_keep_are_named_with_their_host() -> None:
    other = probe("node2", "10.0.0.2", gpus=2, devices="2,3")
    wrong, code = problems(FIRST, other, engine="deepspeed", with_checks=False)
    assert code == 2
    assert any("node2" in text and "CUDA_VISIBLE_DEVICES=2,3" in text for text in wrong)
    assert problems(FIRST, other, with_checks=False) == ([], 1)


def test_checks_can_be_left_out() -> None:
    other = probe("node2", "10.0.0.2", contents="b" * 16, shm_size=0)
    assert len(problems(FIRST, other)[0]) == 2
    assert problems(FIRST, other, with_checks=False)[0] == []


def test_the_same_warning_of_many_hosts_is_one() -> None:
    probes = [probe(f"node{index}", f"10.0.0.{index}", nofile=256) for index in range(1, 4)]
    slots = {each.host: 2 for each in probes}
    _wrong, warnings, _code = fleet.problems(
        probes, slots, engine="torchrun", script=Script("t.py"), cwd="/", with_checks=True
    )
    assert len(warnings) == 1
    assert warnings[0].startswith("node1, node2, node3: RLIMIT_NOFILE is 256")


def test_the_master_is_what_its_name_means_on_the_others() -> None:
    other = probe("node2", "10.0.0.2", routes={"node1": ["10.0.0.1", "eth0"]})
    assert fleet.choose_master([FIRST, other], "") == ("10.0.0.1", "what node1 means on the other hosts")
    assert fleet.choose_master([FIRST, other], "10.9.9.9")[0] == "10.9.9.9"
    assert fleet.choose_master([FIRST], "")[0] == "127.0.0.1"


def test_localhost_as_first_host_is_where_the_others_see_this_one() -> None:
    first = probe("localhost", "10.0.0.1", local=True)
    other = probe("node2", "10.0.0.2", routes={"localhost": ["127.0.0.1", "lo"]},
                  connection=["10.0.0.1", "5000", "10.0.0.2", "22"])  # fmt: skip
    assert fleet.choose_master([first, other], "") == ("10.0.0.1", "where node2 sees this host")


def test_an_alias_of_the_ssh_configuration_is_where_ssh_went() -> None:
    first = probe("alias", "10.0.0.1", connection=["10.0.0.9", "5000", "10.0.0.1", "22"])
    assert fleet.choose_master([first, probe("node2", "10.0.0.2")], "")[0] == "10.0.0.1"


def test_an_address_that_only_the_network_knows_is_not_guessed() -> None:
    first = probe("node1", "10.0.0.1", connection=["10.0.0.9", "5000", "192.168.7.7", "2222"])
    other = probe("node2", "10.0.0.2", routes={"node1": ["192.168.7.7", "eth0"]})
    with pytest.raises(LaunchError, match=r"--master-addr"):
        fleet.choose_master([first, other], "")


def test_a_port_that_is_taken_is_an_error_only_when_asked_for() -> None:
    assert fleet.choose_port(FIRST, None) == 29500
    taken = probe("node1", "10.0.0.1", port=None, other_port=40000)
    assert fleet.choose_port(taken, None) == 40000
    with pytest.raises(LaunchError, match="port 29500 is taken"):
        fleet.choose_port(taken, 29500)


def test_ranks_of_each_host() -> None:
    hosts = hostfile.parse("node1 slots=4\nnode2\n", "hosts")
    probes = [FIRST, probe("node2", "10.0.0.2", gpus=3)]
    assert cli.slots_of(hosts, probes, None) == ({"node1": 4, "node2": 3}, [])
    assert cli.slots_of(hosts, probes, 2) == ({"node1": 2, "node2": 2}, [])
    assert cli.slots_of(hosts, probes, 5)[1] == ["node1 has 4 slots in the hostfile, --nproc asks for 5"]


@pytest.mark.parametrize(
    ("stderr", "hint"),
    [
        ("ssh: connect to host a port 22: Connection refused\n", "start-sshd"),
        ("root@a: Permission denied (publickey).\n", "authorized keys"),
        ("ssh: Could not resolve hostname a: Name or service not known\n", "name in the hostfile"),
        ("Host key verification failed.\n", "cluster key"),
        ("bash: line 1: /usr/local/bin/launch: No such file or directory\n", "no Trainyard image"),
        ("ssh: connect to host a port 22: No route to host\n", "machine up"),
    ],
)
def test_why_a_host_does_not_answer_in_sshs_words_with_a_hint(stderr: str, hint: str) -> None:
    said = ssh.reason("motd\n" + stderr, 255)
    assert said.startswith(stderr.strip())
    assert hint in said


def test_ssh_never_asks_and_gives_up_soon() -> None:
    words = ssh.command("node2", local=False, port=2222)
    assert words[0] == "ssh"
    assert words[-5:] == ["-p", "2222", "node2", "/usr/local/bin/launch", "--agent"]
    assert {"BatchMode=yes", "ConnectTimeout=5"} < set(words)
    assert ssh.command("node1", local=True, port=2222)[-1] == "--agent"


@pytest.mark.parametrize("line", [b"Welcome!\n", b'{"event": broken\n', b'["event"]\n', b"\xff\n", b""])
def test_what_a_shells_startup_files_print_is_no_event(line: bytes) -> None:
    assert fleet.as_event(line) is None


# -- who failed first ----------------------------------------------------------------------

PEER = "RuntimeError: [x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711."
TORCHRUN = "E1130 1 torch/x/api.py:1002] failed (exitcode: {}) local_rank: {} (pid: 9) of binary: python"
DEEPSPEED = (
    "[ERROR] [launch.py:259:x] ['python', '-u', 't.py', '--local_rank={}'] exits with return code = {}"
)


@pytest.mark.parametrize(
    ("offset", "lines", "code", "expected"),
    [
        (0, ["all is well"], 0, None),
        (0, [], 3, Failure(None, 3, "exit code 3")),
        (0, [], -11, Failure(None, 139, "killed by SIGSEGV (a crash in native code)")),
        (2, [TORCHRUN.format(7, 1)], 1, Failure(3, 7, "exit code 7")),
        (2, [TORCHRUN.format(-7, 0)], 1, Failure(2, 135, "killed by SIGBUS (/dev/shm full?)")),
        (0, ["[rank1]: ValueError: boom", TORCHRUN.format(1, 1)], 1,
         Failure(1, 1, "exit code 1, ValueError: boom")),
        # before the process group exists no line names its rank
        (2, ["TypeError: caught", "ImportError: no module x", TORCHRUN.format(1, 0), "ChildFailedError: "], 1,
         Failure(2, 1, "exit code 1, ImportError: no module x")),
        # torchrun found the victim first, the traceback knows better
        (0, [f"[rank0]: {PEER}", "[rank1]: my.Error: boom", TORCHRUN.format(1, 0)], 1,
         Failure(1, 1, "exit code 1, my.Error: boom")),
        (2, [f"[rank2]: {PEER}", TORCHRUN.format(1, 0)], 1, Failure(2, 1, f"exit code 1, {PEER}", True)),
        (2, [f"[rank3]: {PEER}"], 1, Failure(3, 1, f"exit code 1, {PEER}", True)),
        # killed: the others' tracebacks are consequences
        (0, [f"[rank0]: {PEER}", TORCHRUN.format(-9, 1)], 1,
         Failure(1, 137, "killed by SIGKILL (out of memory, or somebody killed it)")),
        (4, [DEEPSPEED.format(1, 5)], 5, Failure(5, 5, "exit code 5")),
        (0, ["x exits with return code = -9"], 247,
         Failure(None, 137, "killed by SIGKILL (out of memory, or somebody killed it)")),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first(
    offset: int, lines: list[str], code: int, expected: Failure | None
) -> None:
    watch = Watch(offset)
    for line in lines:
        watch.line(line)
    assert watch.failure(code) == expected


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (7, 7), (247, -9), (245, -11), (128, 128)])
def test_deepspeeds_launcher_hides_signals_in_its_exit_code(code: int, expected: int) -> None:
    assert unwrapped(code) == expected


def test_an_uncaught_exception_is_reported_before_the_launcher_ends() -> None:
    watch = Watch(0)
    assert not watch.line("ValueError: printed and caught")
    assert not watch.line("[rank0]: Traceback (most recent call last):")
    assert watch.line("[rank0]: ValueError: boom")


VICTIM = Failure(0, 1, "exit code 1, " + PEER, consequence=True)
CULPRIT = Failure(3, 7, "exit code 7, ValueError: boom")


AGENT = """
import json, sys, time
sys.stdin.readline()
for number in range(30):
    print(json.dumps({"event": "line", "text": str(number)}).replace('": ', '":'), flush=True)
    print('{"event":"beat"}', flush=True)
    time.sleep(0.1)
print('{"event":"ended","code":0,"stopped":false}', flush=True)
"""


def test_who_reads_slowly_loses_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager, Ctrl-S or a log on a slow disk: the hosts are heard all the same."""
    printed: list[str] = []

    def slow(text: str, **_options: Any) -> None:
        time.sleep(2 if not printed else 0)
        printed.append(text)

    monkeypatch.setattr(fleet, "LOST_ALWAYS", 1.0)
    monkeypatch.setattr(fleet, "print", slow, raising=False)
    node = Node("torchrun", Script("train.py"), (1,))
    run = fleet.Run([("node1", [sys.executable, "-c", AGENT], node)], {}, "/")
    assert run.watch() == 0
    assert printed == [f"node1 | {number}" for number in range(30)]


def test_a_lost_host_is_the_cause_of_all_other_failures() -> None:
    code, text = fleet.verdict({"node1": VICTIM}, [("node2", "")], {"node1": 1})
    assert (code, text) == (
        1,
        "node2 does not answer any more (killed or unreachable); the other ranks were ended",
    )


def test_a_rank_that_failed_by_itself_comes_before_one_that_lost_its_connection() -> None:
    code, text = fleet.verdict({"node1": VICTIM, "node2": CULPRIT}, [], {"node1": 1, "node2": 1})
    assert code == 7
    assert text.startswith("rank 3 on node2 failed first: exit code 7, ValueError: boom")


def test_of_two_failures_the_first_to_come_is_named() -> None:
    other = Failure(1, 9, "exit code 9")
    assert fleet.verdict({"node2": CULPRIT, "node1": other}, [], {})[0] == 7


def test_a_host_that_ended_without_a_word() -> None:
    assert fleet.verdict({}, [], {"node2": 5}) == (
        5,
        "node2 failed first: exit code 5; the other ranks were ended",
    )
