"""The deep health check: torch is imported and two ranks communicate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from trainyard_node.checks import Finding, ok
from trainyard_node.facts import Facts

PATIENCE = 120  # seconds; two imports of torch on a busy node take some


def collective(facts: Facts, patience: float = PATIENCE) -> Finding:
    """Run ``collective.py`` with 2 ranks under torchrun, for at most ``patience`` seconds."""
    backend = "nccl" if facts.gpus >= 2 else "gloo"
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "collective.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2", script, backend,
    ]  # fmt: skip
    env = {"OMP_NUM_THREADS": "1", **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    child = subprocess.Popen(
        command, env=env, text=True, errors="replace", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks, which have sessions of their own, when it is told to.
        child.send_signal(signal.SIGTERM)
        try:
            output, _ = child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output = ""
        text = f"a collective of 2 ranks over {backend} did not end within {patience:g} s"
        return Finding("error", "collective", text + last_lines(output), remedy(backend))
    if child.returncode:
        text = f"a collective of 2 ranks over {backend} failed"
        return Finding("error", "collective", text + last_lines(output), remedy(backend))
    said = [line for line in output.splitlines() if line.startswith("torch ")]
    return ok("collective", said[-1] if said else "a collective of 2 ranks passed")


def remedy(backend: str) -> str:
    """What to try."""
    if backend == "nccl":
        return "run it again with NCCL_DEBUG=INFO; /dev/shm and the driver are the usual reasons"
    return "python -c 'import torch' must work here, and 127.0.0.1 must be reachable"


def last_lines(output: str) -> str:
    """The end of an output, where Python says what went wrong."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    chosen = errors[-3:] or lines[-5:]
    return ": " + " / ".join(line.strip() for line in chosen) if chosen else ""
