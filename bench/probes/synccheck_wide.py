"""A kernel without a fault that synccheck reports in wide clusters (docs/perf/misc.md).

    compute-sanitizer --tool synccheck python bench/probes/synccheck_wide.py CTAS [CLUSTERS]

A thread of each CTA arrives at the CTA's own barrier, and all wait. Clusters of 16 CTAs are
reported where a second one comes, all of CTAs from the ninth on; clusters of 8 are not.
"""

import sys

import torch
from opkiln.device import cuda

THREADS = 64
SOURCE = r"""
typedef unsigned int u32;
extern "C" __global__ void waits(float* out) {
    __shared__ unsigned long long barrier;
    const u32 at = (u32)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 0;" :: "r"(at) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(at) : "memory");
    } while (!done);
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}
"""


def main() -> None:
    ctas, clusters = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 70
    out = torch.zeros(ctas * clusters * THREADS, device="cuda")
    kernel = cuda.load(SOURCE, "waits", out.device)
    kernel.configure((ctas * clusters, 1, 1), (THREADS, 1, 1), 0, ctas)(out)
    torch.cuda.synchronize()
    print(f"{int(out.sum())} threads ran")


if __name__ == "__main__":
    main()
