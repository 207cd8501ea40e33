"""One rank of a data-parallel Llama, with the model as it is and replaced: RANK MEETING_FILE KIND.

KIND: cuda (a GPU for each rank, over NCCL) or cpu (gloo). Prints the losses, then `same` if both
models have the same after a few steps.
"""

from __future__ import annotations

import contextlib
import copy
import sys

import opkiln
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
STEPS = 5


def losses(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def main(rank: int, meeting: str, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=WORLD,
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    own = transformers.LlamaForCausalLM(config).to(device).train()
    ours = copy.deepcopy(own)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(rank)).to(device)
    # Rank 1's GPU is not the current one: every launch has to find the tensors' own.
    expected = losses(own, ids)
    plan = opkiln.replace(ours, dry_run=False)
    with opkiln.use("torch") if kind == "cpu" else contextlib.nullcontext():
        found = losses(ours, ids)
    print(plan)
    print(expected, found)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)
    assert expected[-1] < expected[0]
    dist.destroy_process_group()
    print("same")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
