// The copies of csrc/topk.cu on the CPU of cpu_device.h. Bytes arrive when they are waited for, and not
// before: until then the place holds NaN.

#include <deque>
#include <map>

struct Copy { void* to; const void* from; };
inline std::map<std::pair<cpu::Block*, u32>, std::deque<std::vector<Copy>>> copies;  // of a thread, by group

inline std::deque<std::vector<Copy>>& own_copies() {
    auto& groups = copies[{cpu::state.self->block, threadIdx.x}];
    if (groups.empty()) groups.emplace_back();  // the last is not committed
    return groups;
}
inline void copy_async(void* to, const void* from) {
    std::memset(to, 0xff, 16);
    own_copies().back().push_back({to, from});
}
inline void copies_commit() { own_copies().emplace_back(); }
template <int OPEN>
void copies_wait() {
    auto& groups = own_copies();
    for (; groups.size() > OPEN + 1; groups.pop_front()) {
        for (const Copy& c : groups.front()) std::memcpy(c.to, c.from, 16);
    }
}
// A barrier counts the copies that were started.
inline void barrier_init(u64* barrier) { *barrier = 0; }
inline void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    std::memcpy(to, from, bytes);
    ++*barrier;
}
inline void barrier_wait(u64* barrier, u32 parity) {
    while ((*barrier & 1) == parity) cpu::yield();
}
