"""The calls of sanitize_cases.py that launch the kernels of the norms."""

from collections.abc import Callable, Iterator
from typing import Any

Case = tuple[str, Callable[[], Any]]


def on_gpu(*shape: int, dtype: Any = None, grad: bool = False) -> Any:
    """Made on the CPU: a GPU's generator would be one more kernel under the tool."""
    import torch

    x = torch.randn(shape).to(dtype or torch.bfloat16).cuda()
    return x.requires_grad_() if grad else x


def row_norms() -> Iterator[Case]:
    import torch
    from opkiln import functional as F

    for dtype in (torch.bfloat16, torch.float32):
        for rows, n in ((1, 4096), (37, 250), (33, 256), (140, 4096), (3, 16384), (5, 70000)):
            x, w, b = on_gpu(rows, n, dtype=dtype), on_gpu(n, dtype=dtype), on_gpu(n, dtype=dtype)
            name = f"{rows} x {n} {dtype}"
            yield (
                f"rms_norm {name}",
                lambda x=x, w=w: F.rms_norm(x, x.shape[1:], w, backend="opkiln"),
            )
            yield (
                f"layer_norm {name}",
                lambda x=x, w=w, b=b: F.layer_norm(x, x.shape[1:], w, b, backend="opkiln"),
            )
    x, r, w, b = on_gpu(37, 1000), on_gpu(37, 1000), on_gpu(1000), on_gpu(1000)
    s = on_gpu(37, 1000)
    given = {"backend": "opkiln"}
    yield "fused_add_rms_norm", lambda: F.fused_add_rms_norm(x, r, (1000,), w, **given)
    yield "fused_add_layer_norm", lambda: F.fused_add_layer_norm(x, r, (1000,), w, b, **given)
    yield "ada_layer_norm", lambda: F.ada_layer_norm(x, s, r, **given)
    yield "ada_layer_norm_zero", lambda: F.ada_layer_norm_zero(x, s, r, s, **given)
    yield (
        "fused_add_rms_norm inplace",
        lambda: F.fused_add_rms_norm(x.clone(), r.clone(), (1000,), w, inplace=True, **given),
    )
    wide = [on_gpu(450, 8201), on_gpu(450, 8201), on_gpu(8201), on_gpu(8201)]  # across vectors
    for op, operands in (
        ("rms_norm", (0, 2)),
        ("layer_norm", (0, 2, 3)),
        ("fused_add_rms_norm", (0, 1, 2)),
        ("fused_add_layer_norm", (0, 1, 2, 3)),
    ):
        x, *others = [wide[i] for i in operands]
        rest = others[op.startswith("fused") :]
        own = others[: len(others) - len(rest)]
        yield (
            f"{op} across vectors",
            lambda op=op, x=x, own=own, rest=rest: getattr(F, op)(x, *own, (8201,), *rest, **given),
        )
    from opkiln_norm import row_cluster

    # A plan is kept by shape, so every tiling has a number of rows of its own.
    for rows, use in zip(
        (300, 301, 302, 303, 3),
        (
            {"cluster": 2, "threads": 128, "vectors": 2},
            {"cluster": 4, "threads": 64, "vectors": 2, "persistent": True, "prefetch": True},
            {"cluster": 2, "threads": 128, "vectors": 2, "ring": 2, "persistent": True},
            {"cluster": 2, "threads": 128, "vectors": 2, "ring": 1, "persistent": True},
            {"cluster": 1, "threads": 256, "vectors": 2, "copies": 2},
        ),
        strict=True,
    ):
        for op in ("rms_norm", "layer_norm", "fused_add_rms_norm"):
            yield (
                f"{op} {use}",
                lambda op=op, r=rows, use=use: clustered(row_cluster, F, op, r, use),
            )


def clustered(module: Any, functional: Any, op: str, rows: int, use: dict[str, Any]) -> Any:
    """A row norm by the CUDA kernel, whatever the tuning table says."""
    n = 4096 if "copies" in use else 4000
    row = {"op": op, "itemsize": 2, "n": n, "rows": [1, None], "label": "sanitize", "use": use}
    module.cluster_rows = lambda: [row]
    x, w = on_gpu(rows, n), on_gpu(n)
    if op == "layer_norm":
        return functional.layer_norm(x, (n,), w, w, backend="opkiln")
    if op == "rms_norm":
        return functional.rms_norm(x, (n,), w, backend="opkiln")
    return functional.fused_add_rms_norm(x, on_gpu(rows, n), (n,), w, backend="opkiln")


def channel_norms() -> Iterator[Case]:
    """Tiny, and few calls: racecheck slows each access to shared memory, and every kernel is
    compiled under the tool.
    """
    import torch
    from opkiln import functional as F
    from opkiln_norm import channel_cuda

    bf16, f32 = torch.bfloat16, torch.float32
    yield "channel rows", lambda: batch_norms(F, (32, 64), bf16)
    small: Any = (((3, 5, 33, 31), bf16), ((64, 3, 7), f32), ((64, 3, 7), bf16))
    for shape, dtype in small:
        name = f"channel {shape} {dtype}"
        yield f"{name} batch", lambda s=shape, d=dtype: batch_norms(F, s, d)
        yield f"{name} planes", lambda s=shape, d=dtype: plane_norms(F, s, d)
    for shape, dtype in (((2, 3, 42, 50), bf16), ((2, 4, 64, 64), f32)):
        name = f"channel sliced {shape} {dtype}"
        yield f"{name} batch", lambda s=shape, d=dtype: sliced(batch_norms, F, s, d)
        yield f"{name} planes", lambda s=shape, d=dtype: sliced(plane_norms, F, s, d)
    yield "channel streamed", lambda: streamed(F, (2, 3, 64, 64))
    uses = [
        ("team", (4, 6, 16, 32), {"vector_bytes": 16, "team_warps": 1, "teams": 4, "vectors": 8}),
        ("team", (3, 6, 16, 32), {
            "vector_bytes": 16, "team_warps": 2, "teams": 1, "vectors": 4, "cluster": 2}),
        ("team", (5, 6, 16, 32), {
            "vector_bytes": 16, "team_warps": 1, "teams": 2, "vectors": 2, "grouped": True,
            "through_l1": True}),
        ("flat", (3, 6, 16, 32), {"threads": 128}),
        ("columns", (24, 64), {"warps": 8, "rows": 4, "lanes": 32}),
        ("ring", (2, 3, 128, 256), {"threads": 128, "registers": 1, "shared": 1, "groups": 2}),
    ]  # fmt: skip
    for kind, shape, use in uses:
        channels, plane = shape[1], torch.Size(shape[2:]).numel()
        rows = [
            {"op": op, "itemsize": 2, "mode": mode, "channels": channels, "cols": plane,
             "kind": kind, "label": "sanitize", "use": use}
            for op in ("batch_norm", "instance_norm", "batch_norm_backward")
            for mode in ("", "given", "averaged")
        ]  # fmt: skip
        yield (
            f"{kind} {use}",
            lambda kind=kind, rows=rows, shape=shape: by_table(channel_cuda, F, kind, shape, rows),
        )


def sliced(norms: Callable[..., None], functional: Any, shape: Any, dtype: Any) -> None:
    """As if no set fitted a program's registers: with small sets."""
    from opkiln_norm import channel_plan

    before, channel_plan.resident = channel_plan.resident, lambda *args: False
    try:
        norms(functional, shape, dtype)
    finally:
        channel_plan.resident = before


def streamed(functional: Any, shape: tuple[int, ...]) -> None:
    """The persistent Triton kernels, which the table names for one backward shape only."""
    import torch
    from opkiln_norm import channel_plan

    n, channels, *plane = shape
    view = [channels, n, torch.Size(plane).numel(), 1]
    use = {"block_m": 1, "block_n": 1024, "num_warps": 4, "slices": 1, "stream": 1}
    rows = [
        {"op": op, "itemsize": 2, "given": False, "view": view, "label": "sanitize", "use": use}
        for op in ("batch_norm", "batch_norm_backward")
    ]
    table = channel_plan.tuning_rows
    channel_plan.tuning_rows = lambda: rows
    batch_norms(functional, shape, torch.bfloat16, evaluation=False)
    channel_plan.tuning_rows = table


def by_table(module: Any, functional: Any, kind: str, shape: Any, rows: list[Any]) -> None:
    """By the CUDA kernels; only what the kind serves."""
    import torch

    f32 = torch.float32
    module.cuda_rows = lambda: rows
    batch_norms(functional, shape, torch.bfloat16, evaluation=kind in ("team", "flat"))
    if kind == "team":
        x, c = on_gpu(*shape), shape[1]
        mean, var = on_gpu(c, dtype=f32), on_gpu(c, dtype=f32).abs()
        functional.instance_norm(x, None, None, mean, mean, backend="opkiln")
        functional.instance_norm(x, mean, var, mean, mean, backend="opkiln")
    module.cuda_rows = lambda: []


def batch_norms(functional: Any, shape: Any, dtype: Any, evaluation: bool = True) -> None:
    import torch

    f32, given = torch.float32, {"backend": "opkiln"}
    x, c = on_gpu(*shape, dtype=dtype), shape[1]
    w, b = on_gpu(c, dtype=dtype), on_gpu(c, dtype=dtype)
    mean, var = on_gpu(c, dtype=f32), on_gpu(c, dtype=f32).abs()
    functional.batch_norm(x, mean, var, w, b, training=True, **given)
    if evaluation:
        functional.batch_norm(x, mean, var, w, b, training=False, **given)
    functional.batch_norm_backward(on_gpu(*shape, dtype=dtype), x, w, mean, var, **given)


def plane_norms(functional: Any, shape: Any, dtype: Any) -> None:
    import torch
    from opkiln.ops import CATALOGUE
    from opkiln.spec import Call
    from opkiln_norm import channel_planes_launch

    f32, given = torch.float32, {"backend": "opkiln"}
    x, g, (n, c) = on_gpu(*shape, dtype=dtype), on_gpu(*shape, dtype=dtype), shape[:2]
    w, b = on_gpu(c, dtype=dtype), on_gpu(c, dtype=dtype)
    mean, var = on_gpu(c, dtype=f32), on_gpu(c, dtype=f32).abs()
    functional.instance_norm(x, None, None, w, b, **given)
    functional.instance_norm(x, mean, var, w, b, **given)
    functional.group_norm(x, 1, w, b, **given)
    own: dict[str, Any]
    for groups, name, own in (
        (c, "instance_norm_backward", {"use_input_stats": True}),
        (1, "group_norm_backward", {"num_groups": 1}),
    ):
        means, rstds = on_gpu(n, groups, dtype=f32), on_gpu(n, groups, dtype=f32).abs()
        tensors, params = [g, x, w, means, rstds], own | {"output_mask": (True, True, True)}
        channel_planes_launch.prepare(Call.of(CATALOGUE[name], tensors, params))(*tensors)
