"""Fine-tune a Hugging Face model with LoRA on a mesh, beside the same on one device.

    pip install transformers peft
    python examples/finetune_hf.py                            # four ranks in one process
    torchrun --nproc-per-node 4 examples/finetune_hf.py       # four processes

The model is a small Llama made from a configuration; one of `from_pretrained` works the same way.
`plan="auto"` reads the tensor-parallel plan that the model brings; the adapters are replicated.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise import Shard

BATCH, LENGTH, VOCABULARY, STEPS = 8, 24, 128, 10


def make_model() -> PeftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(config), lora)


def train(model: nn.Module, lay_out: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
    """The single-device program."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(VOCABULARY, (BATCH, 1))
        tokens = lay_out((starts + torch.arange(LENGTH)) % VOCABULARY)  # a text that counts
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, model = make_model(), make_model()
    model.train()
    plan = sw.make_plan(model, mesh, "auto")
    sw.shard_module(model, mesh, plan)
    single = train(alone)
    meshed = train(model, lambda batch: sw.distribute_tensor(batch, mesh, {"dp": Shard(0)}))
    if sw.is_first_rank():
        print(f"{plan}\n\nstep  one device  on the mesh")
        for step, (a, b) in enumerate(zip(single, meshed, strict=True)):
            print(f"{step:4}  {a:10.4f}  {b:11.4f}")
    torch.testing.assert_close(meshed, single, rtol=1e-3, atol=1e-4)
    text = torch.arange(6).view(1, 6)
    told, found = (m.eval().generate(input_ids=text, max_new_tokens=8) for m in (alone, model))
    torch.testing.assert_close(found.full_tensor(), told)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
