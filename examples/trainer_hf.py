"""Train a Hugging Face model with its `Trainer` on a mesh, beside the same on one device.

    pip install transformers accelerate
    python examples/trainer_hf.py [folder]                        # four ranks in one process
    torchrun --nproc-per-node 4 examples/trainer_hf.py [folder]   # four processes

`Trainer` runs the program of one device: every rank has the same data set, and `data_collator`
shards each batch. At the end all ranks write the ordinary files into the folder.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shardwise as sw
from shardwise import Shard

BATCH, LENGTH, WORDS, STEPS = 8, 24, 128, 10
CONFIG = LlamaConfig(vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
STARTS = torch.arange(0, 7 * BATCH * STEPS, 7).view(-1, 1)
TEXTS = [{"input_ids": row} for row in (STARTS + torch.arange(LENGTH)) % WORDS]


def train(model: LlamaForCausalLM, place: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
    """The single-device program."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        tokens = place(torch.stack([row["input_ids"] for row in rows]))
        return {"input_ids": tokens, "labels": tokens}

    settings = TrainingArguments(
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, data_collator=collate, train_dataset=TEXTS)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    os.environ |= {"LOCAL_RANK": "-1", "WORLD_SIZE": "1"}  # else Trainer wraps the model in DDP
    torch.manual_seed(0)
    alone, model = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    model.load_state_dict(alone.state_dict())
    sw.shard_module(model, mesh, "auto")
    single = train(alone)
    meshed = train(model, lambda batch: sw.distribute_tensor(batch, mesh, {"dp": Shard(0)}))
    if sw.is_first_rank():
        print("step  one device  on the mesh")
        for step, (a, b) in enumerate(zip(single, meshed, strict=True)):
            print(f"{step:4}  {a:10.4f}  {b:11.4f}")
    torch.testing.assert_close(meshed, single, rtol=1e-3, atol=1e-4)
    for folder in sys.argv[1:2]:
        sw.save_safetensors(model, f"{folder}/parts")  # without gathering
        CONFIG.save_pretrained(f"{folder}/parts")
        model.save_pretrained(f"{folder}/whole")
        whole = sw.full_state_dict(model)
        for name in ("parts", "whole") if sw.is_first_rank() else ():
            again = LlamaForCausalLM.from_pretrained(f"{folder}/{name}").state_dict()
            torch.testing.assert_close(dict(again), whole, rtol=0, atol=0)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
