"""Command lines: what the user may say, and what is run for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

_ROOTFS = Path(__file__).resolve().parents[2] / "rootfs"
sys.path[:0] = [str(_ROOTFS / "common/opt/trainyard/lib"), str(_ROOTFS / "launch/opt/trainyard/lib")]

from trainyard_launch import agent, cli, command, network  # noqa: E402
from trainyard_launch.command import Node, Script  # noqa: E402
from trainyard_launch.errors import LaunchError  # noqa: E402
from trainyard_launch.place import Rank, is_loopback  # noqa: E402
from trainyard_launch.processes import Child, descendants  # noqa: E402
from trainyard_node import facts  # noqa: E402

TRAIN = Script("train.py", ("--lr", "1", "--nproc", "9"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner"]

# -- what the user says --------------------------------------------------------------------


def test_everything_after_the_script_is_the_scripts() -> None:
    options = cli.parse(["--nproc", "2", "train.py", "--nproc", "9", "--dry-run", "-m", "--"])
    assert options.script == Script("train.py", ("--nproc", "9", "--dry-run", "-m", "--"))
    assert (options.flags.nproc, options.dry_run) == (2, False)


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["-m", "pkg.train", "-m", "x"], Script("pkg.train", ("-m", "x"), module=True)),
        (["--engine=deepspeed", "train.py"], Script("train.py")),
        (["--", "--odd name.py", "--help"], Script("--odd name.py", ("--help",))),
        (["--hostfile", "train.py", "real.py"], Script("real.py")),
        (["--no-checks", "train.py"], Script("train.py")),
    ],
)
def test_where_the_script_begins(argv: list[str], script: Script) -> None:
    assert cli.parse(argv).script == script


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no script"),
        (["--nproc", "2"], "no script"),
        (["-m"], "-m needs the name of a module"),
        (["--export", "A,B-C", "train.py"], "--export 'B-C'"),
    ],
)
def test_wrong_command_lines(argv: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        cli.parse(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc", "0", "t.py"], "'0' is no whole number from 1 on"),
        (["--nproc", "two", "t.py"], "'two' is no whole number"),
        (["--master-port", "70000", "t.py"], "'70000' is no port"),
        (["--engine", "horovod", "t.py"], "horovod"),
        (["--nprocs", "2", "t.py"], "unrecognized arguments: --nprocs"),
        (["--hostfil", "f", "t.py"], "--hostfil"),
    ],
)
def test_wrong_options_end_with_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.parse(argv)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_shows_examples_and_the_order_of_places(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for part in (
        "launch --hostfile",
        "srun",
        "OMPI_COMM_WORLD_*",
        "PET_NNODES",
        "/job/hostfile",
        "exit code",
    ):
        assert part in text


def test_a_message_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train.py"]) == 2
    assert capsys.readouterr().err.startswith("launch: ")


# -- what is run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            Node("torchrun", TRAIN, (2,)),
            [*TORCHRUN, "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1", *TRAIN.words()],
        ),
        (
            Node("torchrun", Script("pkg.t", ("-x",), module=True), (1,)),
            [*TORCHRUN, "--nproc-per-node=1", "--standalone", "--local-addr=127.0.0.1", "-m", "pkg.t", "-x"],
        ),
        (
            Node("torchrun", TRAIN, (4, 2), ("a", "b"), 1, "10.0.0.1", 29500),
            [*TORCHRUN, "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1",
             "--master-port=29500", *TRAIN.words()],
        ),
        (
            Node("torchrun", TRAIN, (4, 4), elastic=True),
            [*TORCHRUN, "--nproc-per-node=4", *TRAIN.words()],
        ),
        (
            Node("deepspeed", TRAIN, (2,), master_port=1234),
            [*DEEPSPEED, "--hostfile=/dev/null", "--num_gpus=2", "--master_port=1234", *TRAIN.words()],
        ),
        (
            Node("deepspeed", Script("pkg.t", module=True), (2, 2), ("a", "b"), 1, "10.0.0.1", 29500),
            [*DEEPSPEED, "--hostfile=/tmp/h", "--no_ssh", "--node_rank=1", "--master_addr=10.0.0.1",
             "--master_port=29500", "--module", "pkg.t"],
        ),
    ],
)  # fmt: skip
def test_the_command_of_a_node(node: Node, expected: list[str]) -> None:
    assert command.build(node, "/tmp/h") == expected


def test_the_hostfile_for_deepspeed_counts_ranks() -> None:
    assert command.deepspeed_hosts(Node("deepspeed", TRAIN, (4, 2), ("a", "b"))) == "a slots=4\nb slots=2\n"
    assert command.deepspeed_hosts(Node("deepspeed", TRAIN, (1, 1))) == "node0 slots=1\nnode1 slots=1\n"


def test_a_node_travels_to_its_agent_as_it_is() -> None:
    node = Node("torchrun", TRAIN, (4, 2), ("a", "b"), 1, "10.0.0.1", 29500)
    assert agent.node_from_job(agent.job_node(node)) == node


def test_the_environment_of_a_rank() -> None:
    found = command.rank_environment(Rank(3, 4, 1, 2), "m", 7)
    assert found == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2",
        "MASTER_ADDR": "m", "MASTER_PORT": "7",
    }  # fmt: skip
    assert command.rank_command(TRAIN) == [sys.executable, *TRAIN.words()]


@pytest.mark.parametrize(
    ("env", "nproc", "cores", "route", "expected"),
    [
        ({}, 2, 16, None, {"OMP_NUM_THREADS": "8"}),
        ({}, 4, 2, None, {"OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "3"}, 2, 16, None, {}),
        ({}, 1, 1, network.Route("10.0.0.2", "eth7"),
         {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7"}),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, 1, 1, network.Route("10.0.0.2", "eth7"),
         {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth7"}),
    ],
)  # fmt: skip
def test_variables_that_are_set_besides(
    env: dict[str, str], nproc: int, cores: int, route: network.Route | None, expected: dict[str, str]
) -> None:
    assert command.environment(env, threads=max(1, cores // nproc), route=route) == expected


@pytest.mark.parametrize(
    ("env", "rank", "cores", "threads"),
    [
        ({}, Rank(0, 8, 0, 4), 16, 4),
        ({}, Rank(0, 8, 0, 1, local_known=False), 16, None),
        # a task's own cores are not divided again
        ({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "12"}, Rank(0, 8, 0, 8), 12, 12),
        ({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "12"}, Rank(0, 8, 0, 8), 96, 12),
        ({"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "96"}, Rank(0, 8, 0, 8), 12, 12),
        ({"SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "96"}, Rank(0, 8, 0, 8), 96, 12),
    ],
)
def test_threads_of_a_rank(env: dict[str, str], rank: Rank, cores: int, threads: int | None) -> None:
    assert command.rank_threads(env, rank, cores) == threads


@pytest.mark.parametrize(
    ("visible", "nproc", "gpus", "expected"),
    [
        (None, 2, 4, ()),
        ("all", 2, 4, ()),
        ("0,1,2,3", 2, 4, ()),  # what DeepSpeed takes anyway
        ("2,3", 2, 2, ("2", "3")),
        ("3,2,1", 2, 3, ("3", "2")),
        ("", 2, 0, ()),  # no GPU is wanted
    ],
)
def test_deepspeeds_launcher_is_told_the_gpus_that_are_visible(
    visible: str | None, nproc: int, gpus: int, expected: tuple[str, ...]
) -> None:
    assert command.devices(visible, nproc, gpus) == expected
    assert command.device_problem(visible, nproc, gpus, nnodes=1) == ""
    words = command.build(Node("deepspeed", TRAIN, (nproc,), master_port=1, devices=expected))
    gpus_word = f"--include=localhost:{','.join(expected)}" if expected else f"--num_gpus={nproc}"
    assert gpus_word in words


@pytest.mark.parametrize(
    ("visible", "nnodes"), [("2,3", 2), ("GPU-8d3f,GPU-11aa", 1), ("MIG-1,MIG-2", 1), ("3", 1)]
)
def test_gpus_that_deepspeeds_launcher_cannot_be_told(visible: str, nnodes: int) -> None:
    assert "use --engine torchrun" in command.device_problem(visible, 2, 2, nnodes)


def test_torchrun_does_not_see_its_arguments_twice() -> None:
    env = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PATH": "/bin"}
    assert command.removed(env, Node("torchrun", TRAIN, (1,))) == ["PET_NNODES", "PET_RDZV_BACKEND"]
    assert command.removed(env, Node("torchrun", TRAIN, (1, 1), elastic=True)) == []
    assert command.removed(env, None) == []


def test_what_travels_to_other_hosts() -> None:
    env = {
        "NCCL_DEBUG": "INFO", "TORCH_LOGS": "x", "PYTHONPATH": "/p", "HF_HOME": "/h", "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "PATH": "/bin", "HOME": "/root", "HOSTNAME": "a",
        "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "s", "WANDB_API_KEY": "s", "NCCL_SECRET": "s",
        "AWS_SECRET_ACCESS_KEY": "s", "MINE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    assert set(command.exported(env, ["MINE", "NOT_SET"])) == {
        "NCCL_DEBUG", "TORCH_LOGS", "PYTHONPATH", "HF_HOME", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM",
        "MINE",
    }  # fmt: skip
    assert command.exported(env, ["WANDB_API_KEY"])["WANDB_API_KEY"] == "s"


# -- network -------------------------------------------------------------------------------


def test_the_route_to_an_address_of_this_host_is_the_interface_that_has_it() -> None:
    own = facts.interfaces()
    name, address = next((name, has) for name, has in own if not is_loopback(has) and ":" not in has)
    assert network.route(address, own) == network.Route(address, name)
    assert network.route(address, (("eth0", "10.0.0.1"),)) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_no_route_to_the_others_is_lo(address: str) -> None:
    """Debian's installer lets a host's own name mean 127.0.1.1, and that name may be the master's."""
    found = network.route(address, facts.interfaces())
    assert found is None or found.interface != "lo"
    assert found == network.route(network.ANYWHERE, facts.interfaces())


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(LaunchError, match="not known here"):
        network.resolve("no such host.invalid")


def test_waiting_for_a_name_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "QUIET", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    said: list[str] = []
    with pytest.raises(LaunchError, match="not known here"):
        network.resolve("no such host.invalid", 0.3, said.append)
    (text,) = said
    assert text.startswith("waiting for no such host.invalid")


def test_which_hosts_are_this_one() -> None:
    interfaces = (("lo", "127.0.0.1"), ("eth0", "10.0.0.1"))
    for name in ("localhost", "127.0.0.1", "node1", "10.0.0.1", "root@10.0.0.1"):
        assert network.is_here(name, "node1", interfaces), name
    assert not network.is_here("10.0.0.2", "node1", interfaces)


def test_a_port_that_is_taken_is_not_free() -> None:
    port = network.free_port()
    assert port is not None
    assert network.free_port(port) == port
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert network.free_port(listener.getsockname()[1]) is None


# -- processes -----------------------------------------------------------------------------

STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""


def test_output_is_cut_into_lines_and_the_exit_code_is_honest() -> None:
    lines: list[str] = []
    child = Child(
        ["sh", "-c", r"printf 'a\rb\nc'; echo err >&2; exit 7"], os.environ, lines.append, everything=True
    )
    while (code := child.wait(0.1)) is None:
        pass
    child.finish()
    assert code == 7
    assert lines[:2] == ["a", "b"]
    assert "".join(lines[2:]) == "cerr"


@pytest.mark.parametrize("hurry", [False, True])
def test_nothing_is_left_behind_even_of_what_ignores_signals_in_a_session_of_its_own(hurry: bool) -> None:
    lines: list[str] = []
    child = Child([sys.executable, "-c", STUBBORN, STUBBORN], os.environ, lines.append, everything=True)
    while lines.count("up") < 2:
        time.sleep(0.05)
    assert len(descendants()) == 2
    started = time.monotonic()
    child.end(signal.SIGTERM, hurry=lambda: hurry)
    assert time.monotonic() - started < (2 if hurry else 7)
    assert descendants() == []


SAVES = """
import signal, sys, time
def save(*_):
    print("asked", flush=True)
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""


def test_what_saves_a_checkpoint_is_asked_once_and_gets_its_time() -> None:
    lines: list[str] = []
    child = Child([sys.executable, "-c", SAVES], os.environ, lines.append, everything=True)
    while "up" not in lines:
        time.sleep(0.05)
    child.end(signal.SIGTERM, patience=20)
    assert lines == ["up", "asked", "saved"]


def test_what_a_command_leaves_running_is_ended_after_it() -> None:
    child = Child(["sh", "-c", "sleep 60 & exit 0"], os.environ, lambda _text: None)
    while child.wait(0.1) is None:
        pass
    child.finish()
    assert descendants() == []
