// Products of query rows with a tile, and of weights with a tile of values, in one order of summing for any number of rows.
#pragma once

#include <algorithm>

#include "attention_tiles.h"

namespace magicdec::ISA {
namespace {

// c[r][n] = (keep ? keep[r] * c[r][n] : 0) + sum over k = 0, 1, ... of a[r][k] * b[k][n]. a [rows, depth],
// b [depth, columns], c: 32-bit elements; lda, ldb, ldc: from row to row.
struct Product {
    const float *a;
    int64_t lda;
    const float *b;
    int64_t ldb, depth;
    const float *keep;
    float *c;
    int64_t ldc;

    Product part(int64_t row, int64_t column) const {
        return {a + row * lda, lda, b + column, ldb, depth, keep ? keep + row : nullptr, c + row * ldc + column, ldc};
    }
};

template <class Operand, int Rows, int Vectors> void multiply_block(const Product &product, const Prefetch::Some &ahead) {
    const auto [a, lda, b, ldb, depth, keep, c, ldc] = product;
    Floats sums[Rows][Vectors];
    UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v) sums[r][v] = Floats{};
    const auto add = [&, a = a, b = b, lda = lda, ldb = ldb](int64_t k) __attribute__((always_inline)) {
        Floats right[Vectors];
        UNROLL for (int v = 0; v < Vectors; ++v) right[v] = load(b + k * ldb + v * kLanes);
        UNROLL for (int r = 0; r < Rows; ++r) {
            const Floats left = all(a[r * lda + k]);
            UNROLL for (int v = 0; v < Vectors; ++v) sums[r][v] = Operand::add_product(sums[r][v], left, right[v]);
        }
    };
    for (int64_t k = 0; k < ahead.count; ++k) Prefetch::ask(ahead.chunks[k]), add(k);
    for (int64_t k = ahead.count; k < depth; ++k) add(k);
    UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v) {
        float *to = c + r * ldc + v * kLanes;
        store(to, keep ? fma(all(keep[r]), load(to), sums[r][v]) : sums[r][v]);
    }
}

// The same for up to kBlockRows rows and kBlockVectors vectors.
template <class Operand, int Rows = kBlockRows, int Vectors = kBlockVectors>
void multiply_some(int64_t rows, int64_t vectors, const Product &product, const Prefetch::Some &ahead) {
    if constexpr (Rows > 1)
        if (rows < Rows) return multiply_some<Operand, Rows - 1, Vectors>(rows, vectors, product, ahead);
    if constexpr (Vectors > 1)
        if (vectors < Vectors) return multiply_some<Operand, Rows, Vectors - 1>(rows, vectors, product, ahead);
    multiply_block<Operand, Rows, Vectors>(product, ahead);
}

// The same for any number of rows and vectors. Every element is one sum in one order, whatever that number is.
// chunks: how many of those ahead are asked for meanwhile.
template <class Operand>
void multiply(int64_t rows, int64_t vectors, const Product &product, Prefetch &ahead, int64_t chunks) {
    const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows, blocks = row_blocks * ((vectors + kBlockVectors - 1) / kBlockVectors);
    const int64_t share = std::min(product.depth, (std::max<int64_t>(chunks, 0) + blocks - 1) / blocks);
    for (int64_t v = 0; v < vectors; v += kBlockVectors)
        for (int64_t i = 0; i < row_blocks; ++i) {
            const int64_t first = rows * i / row_blocks, last = rows * (i + 1) / row_blocks; // of nearly equal size
            multiply_some<Operand>(
                last - first, std::min<int64_t>(vectors - v, kBlockVectors), product.part(first, v * kLanes), ahead.take(share)
            );
        }
}

// What earlier parts of a sum are multiplied with.
struct Ones {
    float factors[kGroupRows];
    constexpr Ones() : factors() {
        for (float &factor : factors) factor = 1;
    }
};
constexpr Ones kOnes;

// The same, long sums in parts: in float32 their errors grow with the length.
template <class Operand>
void multiply_parts(int64_t rows, int64_t vectors, Product product, Prefetch &ahead, int64_t chunks) {
    constexpr int64_t kPart = 32 * Operand::kNumbers;
    const int64_t depth = product.depth, before = ahead.left();
    for (int64_t k = 0; k < depth; k += kPart) {
        product.depth = std::min(depth - k, kPart);
        multiply<Operand>(rows, vectors, product, ahead, chunks - (before - ahead.left()));
        product.a += kPart, product.b += kPart * product.ldb, product.keep = kOnes.factors;
    }
}

} // namespace
} // namespace magicdec::ISA
