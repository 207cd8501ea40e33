"""Kernels that the sanitizer has to report, so that one knows it looks at ours (sanitize.py)."""

from typing import Any

PLANTED_SOURCE = """
extern "C" __global__ void planted_memory(int* x, long long n) { x[n + threadIdx.x] = 1; }
extern "C" __global__ void planted_race(int* x, long long n) {
    __shared__ int s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void planted_sync(int* x, long long n) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    x[threadIdx.x] = 1;
}
// No error: a thread arrives at its own barrier and waits. In clusters of more than 8 CTAs, where
// a second cluster comes, synccheck (2025.3.1) misses the wait of the ninth CTA and later ones.
extern "C" __global__ void planted_wide_cluster(int* x, long long n) {
    __shared__ unsigned long long barrier;
    const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
    }
    __syncthreads();
    unsigned done;
    do {
        asm volatile("{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\\n"
                     "selp.u32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(at) : "memory");
    } while (!done);
    x[threadIdx.x] = 1;
}
"""
WIDE = 16  # CTAs of the cluster of planted_wide_cluster
WIDE_CLUSTERS = 70  # more than run at once


def planted(name: str, triton_kernel: Any) -> None:
    """Launch the kernel of this name, or Triton's."""
    import torch
    from opkiln.device import cuda

    x = torch.zeros(1000, dtype=torch.int32).cuda()
    if name.endswith("_triton"):
        triton_kernel[(1,)](x, 1000, num_warps=1)
    else:
        kernel = cuda.load(PLANTED_SOURCE, name, x.device)
        wide = (WIDE * WIDE_CLUSTERS, WIDE) if name == "planted_wide_cluster" else (1, 1)
        kernel.configure((wide[0], 1, 1), (64, 1, 1), 0, wide[1])(x, 1000)
    torch.cuda.synchronize()
