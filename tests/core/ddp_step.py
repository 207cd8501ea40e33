"""One rank of a data-parallel step, with the model as it is and replaced: RANK MEETING_FILE.

Prints `same` if gradients, running statistics and what torch's hooks saw are the same in both.
"""

from __future__ import annotations

import copy
import sys

import opkiln
import torch
import torch.distributed as dist
from serving import Calls
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
BUCKET_MB = 0.001  # several buckets, from the second step on
STEPS = 2


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(2),
        torch.nn.LayerNorm(36),
        torch.nn.Linear(36, 36),
        torch.nn.RMSNorm(36),
    )


def step(model: torch.nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], list[str]]:
    """Gradients and buffers after two steps, and what the hooks saw, in their order."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)  # type: ignore[arg-type]
    seen: list[str] = []

    def averaged(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        seen.append(f"bucket {bucket.index()} of {bucket.buffer().numel()}")
        work = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    parallel.register_comm_hook(None, averaged)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    for _ in range(STEPS):
        model.zero_grad()
        parallel(x).square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers()], seen


def main(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    own = model_of()
    ours = copy.deepcopy(own)
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(rank))
    expected, hooks = step(own, x)
    opkiln.replace(ours, dry_run=False)
    with opkiln.use("torch"), Calls() as calls:
        found, our_hooks = step(ours, x)
    ops = ("conv2d", "batch_norm", "max_pool2d", "layer_norm", "rms_norm")
    assert calls == {f"{op}{end}": STEPS for op in ops for end in ("", "_backward")}, calls
    assert our_hooks == hooks and len({h for h in hooks if "bucket" in h}) > 1, (our_hooks, hooks)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()
    print("same")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
