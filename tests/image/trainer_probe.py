"""Train a tiny model with the Hugging Face Trainer; run by test_configs inside an image.

    torchrun ... trainer_probe.py CONFIG RESULT

Nothing is downloaded: the model has random weights, the data is random tokens.  It only records
facts: one JSON file a rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

STEPS = 3
VOCAB, WIDTH, HIDDEN = 512, 512, 2048  # a rank's half of 512 x 2048 in bf16: 1 MiB, so it is swapped


class Tokens(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCAB, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Recorder(Trainer):  # type: ignore[misc]
    """The Trainer; it keeps the loss of every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def training_step(self, *inputs: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*inputs, **options)
        self.losses.append(loss.item())
        return loss


def autos(value: Any, path: str = "") -> list[str]:
    """Where a configuration still says ``auto``."""
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in autos(part, f"{path}.{key}")]
    return [path.lstrip(".")] if value == "auto" else []


def main() -> None:
    """Train, and write this rank's facts."""
    config, result = sys.argv[1:]
    # Made before the model: from_config and from_pretrained shard it by this configuration.
    arguments = TrainingArguments(
        output_dir="/tmp/trainer",
        deepspeed=config,
        bf16=True,
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=0.7,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(shape)
    trainer = Recorder(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()

    engine = trainer.model_wrapped
    optimizer = engine.optimizer
    group = optimizer.param_groups[0]
    zero = engine.config["zero_optimization"]
    folder = (zero.get("offload_optimizer") or {}).get("nvme_path")
    facts = {
        "rank": engine.global_rank,
        "world_size": engine.world_size,
        "engine": type(engine).__name__,
        "is_deepspeed": isinstance(engine, deepspeed.DeepSpeedEngine),
        "stage": engine.zero_optimization_stage(),
        "bf16": engine.bfloat16_enabled(),
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "steps": engine.global_steps,
        "losses": trainer.losses,
        "autos": autos(engine.config),
        "clip": engine.gradient_clipping(),
        "betas": list(group["betas"]),
        "weight_decay": group["weight_decay"],
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "swapped_bytes": {str(p): p.stat().st_size for p in Path(folder).rglob("*.swp")} if folder else {},
    }
    target = Path(result)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"rank_{engine.global_rank}.json").write_text(json.dumps(facts))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
