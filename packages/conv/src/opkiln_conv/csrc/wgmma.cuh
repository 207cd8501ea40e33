// Hopper's copies, barriers and matrix products, beyond device.cuh: sm_90a. tests/conv/cpu_wgmma.h
// has the same names for a CPU. shift.py writes product(), for the width of its tiling, after this.

// Dynamic shared memory from a multiple of 1024 bytes on, where swizzle patterns start.
DEVICE unsigned char* pattern_shared() {
    unsigned char* memory = dynamic_shared();
    return memory + (1024 - shared_address(memory) % 1024) % 1024;
}

// Barriers in shared memory: a phase ends when `count` threads arrived and all expected bytes did.
DEVICE void init_barrier(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(count)
                 : "memory");
}
// Makes them known to the copy engine; the CTA's other threads learn of them by __syncthreads.
DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
DEVICE void arrive_expecting(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
DEVICE bool phase_is_over(u64* barrier, u32 parity) {
    u32 over;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p;}" : "=r"(over) : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return over;
}
// Waits for the end of the phase of this parity; a wait of ten seconds is a fault, not a hang.
DEVICE void wait_phase(u64* barrier, u32 parity) {
    if (phase_is_over(barrier, parity)) return;
    const u64 start = nanoseconds();
    while (!phase_is_over(barrier, parity))
        if (nanoseconds() - start > 10000000000ull) asm volatile("trap;");
}

// Copies a multiple of 16 bytes to shared memory; they arrive at the barrier.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
                 "[%3];" :: "r"(shared_address(to)), "l"(from), "r"(bytes),
                 "r"(shared_address(barrier)) : "memory");
}

// Barriers of `threads` threads, other than number 0 which is __syncthreads'.
DEVICE void sync_some(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
DEVICE void arrive_some(u32 number, u32 threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
template <int REGISTERS>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>  // groups that may still be under way
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }
DEVICE void keep(float& sum) { asm volatile("" : "+f"(sum) :: "memory"); }
