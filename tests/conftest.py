"""Without a GPU, Triton kernels run in its interpreter; triton reads this when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
