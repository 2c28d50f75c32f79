"""The command ``healthcheck``: is this container fit to train, and do its services answer?"""

from __future__ import annotations

import os
import sys

from trainyard_node import checks, facts, services

USAGE = """usage: healthcheck [--deep] [--strict] [--json] [--timeout SECONDS]

Says whether this container is healthy: /dev/shm, limits, driver, GPUs, writable caches and home, and
whether the services that were started here (sshd, Jupyter) answer. Cheap; Docker runs it regularly.

  --deep             also import torch and run a collective of 2 ranks (NCCL with 2 GPUs, else gloo)
  --strict           warnings count: exit code 3
  --json             one JSON document instead of text
  --timeout SECONDS  how long --deep may take (120)

Exit code: 0 healthy (warnings are printed), 1 an error, 3 warnings with --strict, 64 wrong options.
2 is never used: Docker reserves it for health checks.
"""


def main(argv: list[str]) -> int:
    """Run the checks, print them, return the exit code.

    Options are read by hand: argparse alone would take a third of the time this may need.
    """
    wanted = {"--deep": False, "--strict": False, "--json": False}
    patience = 120.0
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        if word == "--timeout":
            value = words.pop(0) if words else ""
            try:
                patience = float(value)
            except ValueError:
                patience = 0.0
            if not patience > 0:
                return wrong(f"--timeout takes a number of seconds, not {value!r}")
        elif word in wanted:
            wanted[word] = True
        else:
            return wrong(f"unknown option {word!r}; known: --deep, --strict, --json, --timeout, --help")

    found = facts.collect(os.environ, ask_driver=wanted["--deep"])
    findings = checks.check(found)
    addresses = [address for _name, address in found.interfaces if not address.startswith("fe80")]
    findings += services.check(services.state_folder(os.environ, os.getuid()), addresses)
    if wanted["--deep"]:
        from trainyard_node import deep

        findings.append(deep.collective(found, patience))
    severity = checks.worst(findings)
    if wanted["--json"]:
        import json

        document = {
            "status": {"ok": "healthy", "warning": "warning", "error": "unhealthy"}[severity],
            "findings": checks.as_json(findings),
            "facts": found._asdict(),
        }
        print(json.dumps(document, indent=1))
    else:
        print(text(found, findings, severity))
    if severity == "error":
        return 1
    return 3 if severity == "warning" and wanted["--strict"] else 0


def text(found: facts.Facts, findings: list[checks.Finding], severity: str) -> str:
    """What people read, and what ``docker inspect`` shows as the log of the health check."""
    status = {"ok": "healthy", "warning": "healthy, with warnings", "error": "unhealthy"}[severity]
    parts = (
        checks.count(found.gpus, "GPU"),
        checks.count(found.cores, "core"),
        f"{checks.size(found.memory)} memory",
        f"/dev/shm {checks.size(found.shm_size)}",
    )
    image = found.image or "no Trainyard image"
    lines = [f"{status}: {image} on {found.hostname}: {', '.join(parts)}"]
    lines += [finding.line() for finding in findings if finding.severity != "ok"]
    lines += [
        f"ok: {finding.text}"
        for finding in findings
        if finding.severity == "ok" and finding.name in (*services.SERVICES, "collective")
    ]
    return "\n".join(lines)


def wrong(message: str) -> int:
    """Bad options.  Not 2, as elsewhere: Docker reserves that code for health checks."""
    print(f"healthcheck: {message}", file=sys.stderr)
    return 64
