// The kernels of one instruction set, as the rest of the library calls them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace magicdec {

struct AttentionArgs;
class AttentionPlan;
struct Decoder;
struct Head;
struct Matrix;
struct Product;
struct Rows;

struct Kernels {
    const char *name;
    // A thread's part of reading `size` bytes once; the result keeps the compiler from leaving it out.
    uint64_t (*read_bytes)(const uint8_t *data, size_t size);
    // A thread's part of one layer's attention: items of the plan as long as there are some, counted by `next` from 0 on.
    // Returns their number; when all are done, the result stands in `out` and the plan can be used again.
    int64_t (*attention)(const AttentionArgs &args, AttentionPlan &plan, const Team &team, std::atomic<int64_t> &next);
    // The product of x [rows, inputs] with some panels of a matrix; memory: linear_thread_size(inputs) floats. again: the
    // memory stands as a call for the same x left it, and rows <= kRowsAtOnce.
    void (*linear)(
        const Matrix &matrix, const Rows &x, int64_t rows, const Share &panels, const Product &product, float *memory, bool again
    );
    // A decoder's steps for one row: see step_kernels.cpp.
    void (*embed)(const Decoder &decoder, int64_t token, float *to);
    void (*norm)(const float *x, const float *weight, const float *offset, int64_t size, float epsilon, const Rows &to, int64_t row);
    void (*write_head)(const Head &head, int64_t size, float epsilon);
    void (*convert)(const Rows &from, int64_t row, int64_t size, const Rows &to);
};

namespace portable {
extern const Kernels kernels;
}
#if MAGICDEC_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

// Those of the best instruction set that this CPU has, or of the one that was chosen.
const Kernels &kernels();

} // namespace magicdec
