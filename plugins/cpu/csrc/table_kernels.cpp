// The table of one instruction set's kernels, and a plain read of memory to compare others with.
#include "isa.h"
#include "kernels.h"

namespace magicdec::ISA {

int64_t attention(const AttentionArgs &args, AttentionPlan &plan, const Team &team, std::atomic<int64_t> &next);
void linear(
    const Matrix &matrix, const Rows &x, int64_t rows, const Share &panels, const Product &product, float *memory, bool again
);
void embed(const Decoder &decoder, int64_t token, float *to);
void norm(const float *x, const float *weight, const float *offset, int64_t size, float epsilon, const Rows &to, int64_t row);
void write_head(const Head &head, int64_t size, float epsilon);
void convert(const Rows &from, int64_t row, int64_t size, const Rows &to);

namespace {

uint64_t read_bytes(const uint8_t *data, size_t size) {
    uint64_t sums[64] = {};
    const uint64_t *words = reinterpret_cast<const uint64_t *>(data);
    const size_t count = size / 8;
    for (size_t i = 0; i + 64 <= count; i += 64)
        for (int lane = 0; lane < 64; ++lane) sums[lane] ^= words[i + lane];
    for (int lane = 1; lane < 64; ++lane) sums[0] ^= sums[lane];
    return sums[0];
}

} // namespace

extern const Kernels kernels;
const Kernels kernels = {
#if defined(MAGICDEC_AVX512)
    "avx512",
#elif defined(MAGICDEC_AVX2)
    "avx2",
#else
    "portable",
#endif
    read_bytes,
    attention,
    linear,
    embed,
    norm,
    write_head,
    convert,
};

} // namespace magicdec::ISA
