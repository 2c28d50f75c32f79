"""Load and train with DeepSpeed configurations; run by test_configs inside an image.

    python config_probe.py load FILE...                       as DeepSpeed reads them: JSON on stdout
    torchrun ... config_probe.py train --engine-config FILE ...  the example trainer, a larger model

The trainer is the example's own, with a model whose parameters are large enough to be sharded and
swapped (DeepSpeed keeps anything below 1 MiB in memory, whatever the configuration says), and with
the configuration's own learning rate and clipping for ``--reference``.  It only records facts.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, "/opt/trainyard/examples")
import train_zero3 as example

WIDTH, HEADS, HIDDEN, LAYERS = 512, 8, 2048, 1  # a rank's half of 512 x 2048 in bf16: 1 MiB


# -- loading -------------------------------------------------------------------------------


class Seen(dict[str, Any]):
    """A dictionary that remembers which of its keys were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


class Lines(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load(path: Path) -> dict[str, Any]:
    """Which keys DeepSpeed never asked for, and what it warned of.

    It ignores unknown keys at the top and in ``aio`` in silence; those of ``zero_optimization`` and
    ``bf16`` it refuses.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    warnings = Lines()
    logger.addHandler(warnings)
    config = Seen(json.loads(path.read_text()))
    parts = {"": config}
    for name in ("aio", "optimizer"):
        if name in config:
            parts[f"{name}."] = config[name] = Seen(config[name])
    try:
        read = DeepSpeedConfig(config)
    finally:
        logger.removeHandler(warnings)
    unread = [prefix + key for prefix, part in parts.items() for key in sorted(set(part) - part.seen)]
    return {"unread": unread, "warnings": warnings.lines, "stage": int(read.zero_config.stage)}


# -- training ------------------------------------------------------------------------------


def build_model(seed: int, tied: bool) -> example.TinyLM:
    """A larger model than the example's."""
    torch.manual_seed(seed)
    return example.TinyLM(width=WIDTH, heads=HEADS, hidden=HIDDEN, layers=LAYERS, tied=tied)


def placement(engine: Any) -> dict[str, Any]:
    """Where parameters and optimizer really are, beside what the example records."""
    config = engine.config
    zero = config["zero_optimization"]
    folder = (zero.get("offload_optimizer") or {}).get("nvme_path")
    swapped = {str(p): p.stat().st_size for p in Path(folder).rglob("*.swp")} if folder else {}
    optimizer = engine.optimizer
    parameters = list(engine.module.parameters())
    return {
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp32",
        "betas_eps_decay": [
            [*group["betas"], group["eps"], group["weight_decay"]] for group in optimizer.param_groups
        ],
        "offload_optimizer": device_of(engine.zero_offload_optimizer()),
        "offload_param": device_of(engine.zero_offload_param()),
        "swaps_optimizer": bool(getattr(optimizer, "swap_optimizer", False)),
        "partitions_on": sorted({str(getattr(p, "ds_tensor", p).device.type) for p in parameters}),
        "swapped_bytes": swapped,
        "swapped_out": sum(
            getattr(p, "ds_tensor", p).status.name == "NOT_AVAILABLE"
            for p in parameters
            if hasattr(p, "ds_tensor")
        ),
    }


def device_of(section: Any) -> str:
    """The device that an offload section names."""
    return "none" if section is None else str(getattr(section.device, "value", section.device))


def train() -> None:
    """Run the example's trainer with the model and the facts above."""
    arguments = sys.argv[1:]
    path = Path(arguments[arguments.index("--engine-config") + 1])
    config = json.loads(path.read_text())
    params = config["optimizer"]["params"]
    example.LEARNING_RATE, example.BETAS = params["lr"], tuple(params["betas"])
    example.EPS, example.WEIGHT_DECAY = params["eps"], params["weight_decay"]
    example.CLIP = config["gradient_clipping"]
    example.build_model = build_model

    sharding_facts = example.sharding_facts
    example.sharding_facts = lambda engine: sharding_facts(engine) | placement(engine)
    example.main()


if __name__ == "__main__":
    if sys.argv.pop(1) == "load":
        print(json.dumps({path: load(Path(path)) for path in sys.argv[1:]}))  # noqa: T201
    else:
        train()
