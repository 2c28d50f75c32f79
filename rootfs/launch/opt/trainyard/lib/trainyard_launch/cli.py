"""The command line of ``launch``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard_node import checks, facts

from trainyard_launch import agent, command, fleet, hostfile, network, place, ssh
from trainyard_launch.errors import FAILED, LaunchError
from trainyard_launch.failure import Watch, unwrapped
from trainyard_launch.processes import PATIENCE, Child, Signals

RENDEZVOUS = 600.0  # seconds for the other nodes to appear, as torch waits for them

EXAMPLES = """examples:
  launch train.py --lr 1e-4                    this node: one rank for each GPU, one on the CPU
  launch --nproc 2 train.py                    two ranks
  launch --engine deepspeed train.py           by DeepSpeed's launcher instead of torchrun
  launch --hostfile hosts train.py             all hosts of the file, over ssh (lines: node1 slots=8)
  launch --nproc 8 -m package.train            a module; everything after it belongs to it
  srun --ntasks-per-node=1 launch train.py     Slurm; one task for each rank works too
  mpirun -x MASTER_ADDR=node1 launch train.py  Open MPI: each process becomes a rank
  launch --dry-run ...                         say what would run, and why; start nothing

where it is, the first that applies decides:
   1  --nnodes, --node-rank, --master-addr     on every node
   2  --hostfile
   3  RANK, LOCAL_RANK and WORLD_SIZE          this process is a rank already
   4  OMPI_COMM_WORLD_* (Open MPI), PMI_RANK with MPI_LOCALRANKID (MPICH, Intel MPI)
   5  a Slurm step                             one task on each node, or one for each rank
   6  PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR    Kubeflow Trainer, PyTorchJob
   7  WORLD_SIZE and RANK without LOCAL_RANK   PyTorchJob: there they count pods
   8  LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS    LeaderWorkerSet
   9  NNODES, NODE_RANK or JOB_COMPLETION_INDEX, MASTER_ADDR  Indexed Job
  10  /job/hostfile, if it exists
  11  else one node

Hosts of a hostfile get these variables: NCCL_*, GLOO_*, TORCH*, PYTORCH_*, TRITON_*, DS_*, OMP_*, PYTHON*,
HF_HOME and a few more; other ones with --export. CUDA_VISIBLE_DEVICES stays where it is.

exit code: that of the rank that failed first (128 + n for signal n); 0 done, 1 a node is not fit or was
lost, 2 wrong input, 130 and 143 interrupted.
"""


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    flags: place.Flags
    engine: str
    dry_run: bool
    checks: bool
    ssh_port: int | None
    grace: float  # seconds
    export: tuple[str, ...]
    script: command.Script


def parser() -> argparse.ArgumentParser:
    """All options but the script and its arguments, which are taken by hand."""
    made = argparse.ArgumentParser(
        prog="launch",
        usage="launch [options] train.py [arguments]\n       launch [options] -m module [arguments]",
        description="Start training, on one node or many. Finds out where it is and builds the command.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number = _at_least(1)
    made.add_argument("--nproc", type=number, metavar="N", help="ranks on each node (GPUs, else 1; or slots)")
    made.add_argument("--hostfile", metavar="FILE", help="hosts to reach over ssh, `host slots=N` a line")
    made.add_argument("--engine", choices=command.ENGINES, default="torchrun", help="what starts the ranks")
    made.add_argument("--dry-run", action="store_true", help="print what would run and why")
    made.add_argument("--no-checks", action="store_true", help="start whatever the checks say")
    made.add_argument("--nnodes", type=number, metavar="N", help="number of nodes")
    made.add_argument("--node-rank", type=_at_least(0), metavar="R", help="this node's number, from 0 on")
    made.add_argument("--master-addr", metavar="ADDR", help="address of node 0, as the others reach it")
    made.add_argument("--master-port", type=_port, metavar="PORT", help=f"its port ({place.DEFAULT_PORT})")
    made.add_argument(
        "--ssh-port", type=_port, metavar="PORT", help="of sshd on the hosts (ssh's own default)"
    )
    made.add_argument("--export", action="append", default=[], metavar="NAME[,NAME]",
                      help="more variables for every host of a hostfile")  # fmt: skip
    made.add_argument("--grace", type=_at_least(0), metavar="SECONDS", default=PATIENCE,
                      help=f"for ranks to end after a signal, say to save ({PATIENCE:.0f})")  # fmt: skip
    made.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a file")
    return made


def _at_least(lowest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return convert


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 1 to 65535")
    return int(text)


def split(argv: Sequence[str]) -> tuple[list[str], str, bool, list[str]]:
    """Own options, the script (or module), whether it is a module, and what belongs to it.

    argparse cannot: it would take options of the script that look like its own.
    """
    own: list[str] = []
    words = list(argv)
    takes_value = {
        option for action in parser()._actions if action.nargs is None for option in action.option_strings
    }
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if word == "-m":
            if not words:
                raise LaunchError("-m needs the name of a module")
            return own, words[0], True, words[1:]
        if not word.startswith("-") or word == "-":
            return own, word, False, words
        own.append(word)
        if word in takes_value and words:
            own.append(words.pop(0))
    return own, words[0] if words else "", False, words[1:]


def parse(argv: Sequence[str]) -> Options:
    """The command line; wrong options end the program with argparse's message and code 2."""
    own, script, module, rest = split(argv)
    read = parser().parse_args(own)
    if not script:
        raise LaunchError("no script. Usage: launch [options] train.py [arguments]; launch --help")
    names = [name.strip() for text in read.export for name in text.split(",")]
    for name in names:
        if not name.isidentifier():
            raise LaunchError(f"--export {name!r}: expected names of variables, with commas between them")
    flags = place.Flags(
        nproc=read.nproc,
        hostfile=read.hostfile,
        nnodes=read.nnodes,
        node_rank=read.node_rank,
        master_addr=read.master_addr,
        master_port=read.master_port,
    )
    return Options(
        flags,
        engine=read.engine,
        dry_run=read.dry_run,
        checks=not read.no_checks,
        ssh_port=read.ssh_port,
        grace=read.grace,
        export=tuple(names),
        script=command.Script(script, tuple(rest), module),
    )


def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code."""
    if list(argv) == ["--agent"]:
        return agent.main()
    try:
        options = parse(argv)
        where = place.detect(os.environ, options.flags, job_hostfile=os.path.isfile(place.DEFAULT_HOSTFILE))
        if where.kind == "hosts":
            return run_hosts(options, where)
        return run_here(options, where)
    except LaunchError as error:
        for line in str(error).splitlines():
            print(f"launch: {line}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130


# -- here ----------------------------------------------------------------------------------


def run_here(options: Options, where: place.Place) -> int:
    """Start the ranks of this node, or become a rank."""
    found = facts.collect(os.environ)
    nproc, why = ranks_here(options, where, found)
    require_script(options.script)
    if options.engine == "deepspeed" and where.kind == "node":
        require_deepspeed(where)
    findings = checks.check(found, ranks=nproc, bound=where.kind == "rank") if options.checks else []
    node = None
    if where.kind == "node":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = command.devices(visible, nproc, found.gpus)
        problem = command.device_problem(visible, nproc, found.gpus, where.nnodes)
        if problem and options.engine == "deepspeed":
            raise LaunchError(problem)
        port = where.master_port or network.free_port() or place.DEFAULT_PORT
        slots = (nproc,) * where.nnodes
        node = command.Node(
            options.engine,
            options.script,
            slots,
            node_rank=where.node_rank,
            master_addr=where.master_addr,
            master_port=port,
            elastic=where.elastic,
            devices=gpus if options.engine == "deepspeed" else (),
        )
    if not options.dry_run:
        report(findings, "")
        refuse(findings)
    route = master_route(where, found, wait=not options.dry_run)
    threads: int | None = max(1, found.cores // nproc)
    if where.rank is not None:
        threads = command.rank_threads(os.environ, where.rank, found.cores)
    added = command.environment(os.environ, threads=threads, route=route)
    if node is None:
        assert where.rank is not None
        assert where.master_port is not None
        added |= command.rank_environment(where.rank, where.master_addr, where.master_port)
        words = command.rank_command(options.script)
    else:
        words = command.build(node, "HOSTFILE")
    removed = command.removed(os.environ, node)
    if options.dry_run:
        print(f"place:   {where.name}\nbecause: {where.why}")
        print(f"ranks:   {nproc} on this node ({why})")
        if where.kind == "rank":
            assert where.rank is not None
            print(f"rank:    {where.rank.rank} of {where.rank.world_size}; --engine plays no part")
        elif where.nnodes > 1 and not where.elastic:
            print(f"nodes:   {where.nnodes}, this is number {where.node_rank}; "
                  f"master {where.master_addr}:{where.master_port}")  # fmt: skip
        if where.nnodes > 1 and route is None and not place.is_loopback(where.master_addr):
            print(f"network: {where.master_addr} is not known here (yet), so no interface is chosen")
        if node is not None and options.engine == "deepspeed" and len(node.slots) > 1:
            print("HOSTFILE: " + "; ".join(command.deepspeed_hosts(node).splitlines()))
        show(findings, "", options.checks)
        print_command("", added, removed, words)
        return FAILED if checks.worst(findings) == "error" else 0

    env = {name: value for name, value in os.environ.items() if name not in removed} | added
    if where.kind == "rank":
        sys.stdout.flush()
        os.execve(words[0], words, env)
    assert node is not None
    return supervise(node, env, options.grace)


def ranks_here(options: Options, where: place.Place, found: facts.Facts) -> tuple[int, str]:
    """How many ranks run on this node, and why."""
    if where.rank is not None:
        return where.rank.local_world_size, "started by " + where.name.partition(",")[0]
    if options.flags.nproc is not None:
        return options.flags.nproc, "--nproc"
    if where.nproc is not None:
        return where.nproc, where.nproc_why
    return default_ranks(found)


def default_ranks(found: facts.Facts) -> tuple[int, str]:
    """One rank for each GPU, one on the CPU."""
    if found.gpus:
        return found.gpus, f"one for each GPU: {found.gpus_why}"
    return 1, f"no GPU ({found.gpus_why}); more CPU ranks: --nproc N"


def require_script(script: command.Script) -> None:
    """The file must exist; a module is Python's own business."""
    if not script.module and not Path(script.name).is_file():
        raise LaunchError(f"{script.name}: there is no such file in {os.getcwd()}")


def require_deepspeed(where: place.Place) -> None:
    """DeepSpeed's launcher must be there, and cannot do everything."""
    if importlib.util.find_spec("deepspeed") is None:
        image = os.environ.get("TRAINYARD_IMAGE", "this image")
        raise LaunchError(f"--engine deepspeed: {image} has no DeepSpeed; use --engine torchrun")
    if where.elastic:
        raise LaunchError("--engine deepspeed cannot use an elastic rendezvous (PET_RDZV_*); use torchrun")


def master_route(where: place.Place, found: facts.Facts, *, wait: bool) -> network.Route | None:
    """How this node reaches the master, where there is one on another node."""
    if where.nnodes < 2 or not where.master_addr:
        return None
    if all(os.environ.get(name) for name in network.VARIABLES):
        return None  # the user knows
    try:
        address = network.resolve(where.master_addr, RENDEZVOUS if wait else 0, _say)
    except LaunchError:
        if wait:
            raise
        return None
    return network.route(address, found.interfaces)


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def supervise(node: command.Node, env: Mapping[str, str], grace: float) -> int:
    """Run the launcher of this node's ranks, and leave nothing behind."""
    import tempfile

    signals = Signals()
    watch = Watch(sum(node.slots[: node.node_rank]))
    stdin = None if not sys.stdin or not sys.stdin.isatty() else os.open(os.devnull, os.O_RDONLY)
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        path = Path(folder) / "hostfile"
        path.write_text(command.deepspeed_hosts(node), encoding="utf-8")
        words = command.build(node, str(path))
        child = Child(words, env, watch.line, stdin=stdin, raw=2)
        while (code := child.wait(0.1)) is None:
            if signals.first:
                child.end(signals.first, hurry=lambda: signals.again, patience=grace)
                return 128 + signals.first
        child.finish()
    if code == 0:
        return 0
    failure = watch.failure(unwrapped(code) if node.engine == "deepspeed" else code)
    assert failure is not None
    who = "a rank" if failure.rank is None else f"rank {failure.rank}"
    print(f"launch: {who} failed first: {failure.why}", file=sys.stderr)
    return failure.code


# -- on hosts ------------------------------------------------------------------------------


def run_hosts(options: Options, where: place.Place) -> int:
    """Look at all hosts, then run on all of them."""
    hosts = hostfile.read(Path(where.hostfile))
    cwd = os.getcwd()
    env = command.exported(os.environ, options.export)
    probes = fleet.probe_all(
        hosts, ssh_port=options.ssh_port, cwd=cwd, script=options.script, env=env,
        master_port=where.master_port,
    )  # fmt: skip
    slots, wrong = slots_of(hosts, probes, options.flags.nproc)
    found, warnings, code = fleet.problems(
        probes, slots, engine=options.engine, script=options.script, cwd=cwd, with_checks=options.checks
    )
    if wrong:
        code = 2
    wrong += found
    address, why, port = "", "", 0
    if not wrong:
        address, why = fleet.choose_master(probes, where.master_addr)
        port = fleet.choose_port(probes[0], where.master_port)
    if options.dry_run:
        print(f"place:   {where.name}, {len(hosts)} hosts\nbecause: {where.why}")
        if not wrong:
            print(f"master:  {address}:{port} ({why})")
    for warning in warnings:
        print(f"launch: warning: {warning}", file=sys.stderr)
    for problem in wrong:
        print(f"launch: error: {problem}", file=sys.stderr)
    if wrong:
        print("launch: nothing was started", file=sys.stderr)
        return code
    counts = tuple(slots[host.name] for host in hosts)
    nodes = []
    for index, (host, probe) in enumerate(zip(hosts, probes, strict=True)):
        node = command.Node(options.engine, options.script, counts, tuple(h.name for h in hosts), index,
                            address, port)  # fmt: skip
        nodes.append((host.name, ssh.command(host.name, local=probe.local, port=options.ssh_port), node))
    if options.dry_run:
        for (name, reach, node), probe in zip(nodes, probes, strict=True):
            assert probe.facts is not None
            by = "this host" if probe.local else shlex.join(reach)
            print(f"\n{name}: {checks.count(node.nproc, 'rank')}; {by}")
            route = None
            if len(hosts) > 1:
                way = [way for way in probe.routes.values() if way[0] == address]
                interface = probe.interface(address) or (way[0][1] if way else "")
                route = network.Route(address, interface) if interface else None
            threads = max(1, probe.facts.cores // node.nproc)
            added = command.environment(env, threads=threads, route=route)
            print_command("  ", {**env, **added}, [], command.build(node, "HOSTFILE"))
        return 0
    return fleet.Run(nodes, env, cwd, options.grace).watch()


def slots_of(
    hosts: Sequence[hostfile.Host], probes: Sequence[fleet.Probe], nproc: int | None
) -> tuple[dict[str, int], list[str]]:
    """Ranks of each host, and what is wrong with them."""
    slots: dict[str, int] = {}
    wrong: list[str] = []
    for host, probe in zip(hosts, probes, strict=True):
        if nproc is not None and host.slots is not None and nproc > host.slots:
            wrong.append(f"{host.name} has {host.slots} slots in the hostfile, --nproc asks for {nproc}")
        default = default_ranks(probe.facts)[0] if probe.facts else 1
        slots[host.name] = nproc or host.slots or default
    return slots, wrong


# -- saying --------------------------------------------------------------------------------


def report(findings: Sequence[checks.Finding], prefix: str) -> None:
    """Print what is not in order."""
    for finding in findings:
        if finding.severity != "ok":
            print(f"launch: {prefix}{finding.line()}", file=sys.stderr)


def refuse(findings: Sequence[checks.Finding]) -> None:
    """End here if a check failed."""
    if checks.worst(findings) == "error":
        raise LaunchError("this node is not fit, nothing was started (--no-checks starts anyway)", FAILED)


def show(findings: Sequence[checks.Finding], indent: str, checked: bool) -> None:
    """The findings, in a dry run."""
    if not checked:
        print(f"{indent}checks:  none (--no-checks)")
    for finding in findings:
        print(f"{indent}check:   {finding.line()}")


def print_command(
    indent: str, added: Mapping[str, str], removed: Sequence[str], words: Sequence[str]
) -> None:
    """Environment and command, for a shell."""
    for name in removed:
        print(f"{indent}unset {name}")
    for name, value in sorted(added.items()):
        print(f"{indent}export {name}={shlex.quote(value)}")
    print(indent + shlex.join(words))
