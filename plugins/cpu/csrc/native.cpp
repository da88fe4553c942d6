// The C interface of the library: which kernels run, on how many threads. plugins/cpu/library.py declares it.
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace magicdec {
namespace {

#if MAGICDEC_X86
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}
#endif

const Kernels *find(const char *name) {
    const auto wanted = [name](const Kernels &set) { return name == nullptr || std::strcmp(name, set.name) == 0; };
#if MAGICDEC_X86
    __builtin_cpu_init();
    if (has_avx512() && wanted(avx512::kernels)) return &avx512::kernels;
    if (has_avx2() && wanted(avx2::kernels)) return &avx2::kernels;
#endif
    return wanted(portable::kernels) ? &portable::kernels : nullptr;
}

const Kernels *chosen = find(nullptr);

} // namespace

const Kernels &kernels() { return *chosen; }

} // namespace magicdec

using namespace magicdec;

// SHA-256 of the sources that this library was made from.
EXPORT const char *magicdec_sources() { return MAGICDEC_SOURCES; }

EXPORT const char *magicdec_isa() { return kernels().name; }

// 0 = done, 1 = the CPU or this build has no such instruction set. Not while a kernel runs.
EXPORT int magicdec_set_isa(const char *name) {
    const Kernels *found = find(name);
    if (found == nullptr) return 1;
    chosen = found;
    return 0;
}

EXPORT void magicdec_set_num_threads(int count) { set_num_threads(count); }

EXPORT int magicdec_num_threads() { return num_threads(); }

// Asks for large pages under memory that is not yet written to: walks through a pool then miss fewer translations. A
// wish only; where the system has none to give, nothing changes.
EXPORT void magicdec_use_huge_pages(uint8_t *data, size_t size) {
#if defined(__linux__)
    constexpr uintptr_t kPage = 2 << 20;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / kPage * kPage;
    if (start < end) madvise(reinterpret_cast<void *>(start), end - start, MADV_HUGEPAGE);
#endif
}

// Reads `size` bytes once with all threads.
EXPORT uint64_t magicdec_read_bytes(const uint8_t *data, size_t size) {
    uint64_t parts[64] = {};
    run_parallel([&](const Team &team) {
        const Share share = share_of(static_cast<int64_t>(size), 4096, team);
        parts[team.index % 64] = kernels().read_bytes(data + share.first, static_cast<size_t>(share.last - share.first));
    });
    uint64_t all = 0;
    for (uint64_t part : parts) all ^= part;
    return all;
}
