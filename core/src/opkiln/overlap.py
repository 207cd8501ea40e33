"""Whether tensors share memory: an op that writes its inputs refuses those that do."""

from __future__ import annotations

import torch

from opkiln.spec import TensorMeta


def span_bytes(meta: TensorMeta) -> int:
    """Bytes from the first element to the end of the last."""
    if meta.numel == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True))
    return (last + 1) * meta.dtype.itemsize


def share_memory(a: torch.Tensor, b: torch.Tensor, meta_a: TensorMeta, meta_b: TensorMeta) -> bool:
    """Whether some byte may belong to both: spans that cross, columns of one buffer told apart."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    span_a, span_b = span_bytes(meta_a), span_bytes(meta_b)
    if start_a >= start_b + span_b or start_b >= start_a + span_a:
        return False
    (rows_a, row_a), (rows_b, row_b) = _rows(meta_a), _rows(meta_b)
    if row_a != row_b:
        return True
    columns_a, columns_b = span_a - (rows_a - 1) * row_a, span_b - (rows_b - 1) * row_b
    shift = (start_b - start_a) % row_a
    return shift < columns_a or shift + columns_b > row_a


def _rows(meta: TensorMeta) -> tuple[int, int]:
    """Size and stride in bytes of the dim with the largest stride."""
    dims = zip(meta.stride, meta.shape, strict=True)
    stride, size = max((d for d in dims if d[1] != 1), default=(1, 1))
    return size, stride * meta.dtype.itemsize
