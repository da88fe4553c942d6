// A tile of keys and one of values in the order that a product reads, and what will be read next.
#pragma once

#include <algorithm>

#include "attention.h"
#include "isa.h"
#include "simd.h"

namespace magicdec::ISA {
namespace {

// kLanes operands of a cache row from dimension `at` on, zeros beyond the row's end.
template <class Cache, class Operand> struct Loader {
    static_assert(Operand::kNumbers == 1);
    static Floats load(const typename Cache::Element *row) { return Cache::widen(row); }
};

#if defined(MAGICDEC_AVX512)
template <> struct Loader<BFloat16, Pair> {
    static Floats load(const uint16_t *row) { return ISA::load(row); }
};

// The bfloat16 of each E4M3 magnitude.
struct Float8Table {
    alignas(64) uint16_t numbers[128];
    constexpr Float8Table() : numbers() {
        for (int i = 0; i < 127; ++i) {
            const int exponent = i >> 3, mantissa = i & 7, top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
            const int bits = exponent > 0   ? (exponent + 120) << 7 | mantissa << 4
                             : mantissa > 0 ? (top + 118) << 7 | (mantissa - (1 << top)) << (7 - top)
                                            : 0;
            numbers[i] = static_cast<uint16_t>(bits);
        }
        numbers[127] = 0x7fc0;
    }
};
constexpr Float8Table kFloat8Table;

template <> struct Loader<Float8, Pair> {
    static Floats load(const uint8_t *row) {
        const auto part = [](int index) { return _mm512_load_si512(kFloat8Table.numbers + 32 * index); };
        const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)row));
        const __m512i low = _mm512_permutex2var_epi16(part(0), x, part(1));
        const __m512i high = _mm512_permutex2var_epi16(part(2), x, part(3));
        const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), low, high);
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
        return (Floats)_mm512_or_si512(magnitude, sign);
    }
};

// Which of two rows' 64 numbers stand in the pairs of the first half and of the second.
struct PairOrder {
    alignas(64) uint16_t indices[64];
    constexpr PairOrder() : indices() {
        for (int i = 0; i < 64; ++i) indices[i] = static_cast<uint16_t>(i / 2 + 32 * (i % 2));
    }
};
constexpr PairOrder kPairOrder;
#endif

// Full: no row ends between them.
template <class Cache, class Operand, bool Full = false>
inline Floats load_part(const typename Cache::Element *row, int64_t at, int64_t head_size) {
    constexpr int64_t kCount = kLanes * Operand::kNumbers;
    if (Full || at + kCount <= head_size) return Loader<Cache, Operand>::load(row + at);
    typename Cache::Element part[kCount] = {};
    if (at < head_size) std::memcpy(part, row + at, static_cast<size_t>(head_size - at) * sizeof part[0]);
    return Loader<Cache, Operand>::load(part);
}

// Where the rows of a tile, or of a split, stand: elements from the first slot of a KV head on.
struct TileRows {
    int64_t offsets[kMaxSplit];

    // Entries start .. start + count; then, up to `end`, the first of them again: what is masked needs a number only.
    void find(const AttentionSequence &sequence, const AttentionArgs &args, int64_t start, int64_t count, int64_t end) {
        const int64_t block_size = args.block_size, head_size = args.head_size;
        int64_t block = start / block_size, offset = start % block_size;
        for (int64_t i = 0; i < count; ++block, offset = 0) {
            const int64_t first = (sequence.blocks[block] * block_size + offset) * head_size, last = std::min(count, i + block_size - offset);
            for (int64_t j = i; j < last; ++j) offsets[j] = first + (j - i) * head_size;
            i = last;
        }
        for (int64_t i = count; i < end; ++i) offsets[i] = offsets[0];
    }
};

// Rows that will be read soon, asked for a few at a time while others are computed with: that keeps the memory busy, and
// it takes one core's few outstanding reads no more than it has.
struct Prefetch {
    static constexpr int64_t kChunk = 128, kMost = 2; // bytes that are asked for at a time; chunks of a row: the CPU sees the rest coming
    const char *chunks[kMost * kTile];
    int64_t next = 0, count = 0;

    void clear() { next = count = 0; }

    int64_t left() const { return count - next; }

    template <class Element> void plan(const Element *cache, const TileRows &rows, int64_t num_rows, int64_t head_size) {
        const int64_t bytes = head_size * static_cast<int64_t>(sizeof(Element));
        clear();
        for (int64_t i = 0; i < num_rows; ++i) chunks[i] = reinterpret_cast<const char *>(cache + rows.offsets[i]);
        count = num_rows;
        if (bytes <= kChunk) return;
        for (int64_t i = 0; i < num_rows; ++i) chunks[count++] = chunks[i] + kChunk;
    }

    // The next of up to `most` chunks, and how many there are.
    struct Some {
        const char *const *chunks;
        int64_t count;
    };
    Some take(int64_t most) {
        const Some some = {chunks + next, std::min(most, count - next)};
        next += some.count;
        return some;
    }

    static void ask(const char *chunk) {
        __builtin_prefetch(chunk);
        __builtin_prefetch(chunk + 64);
    }

    void issue(int64_t most) {
        const Some some = take(most);
        for (int64_t i = 0; i < some.count; ++i) ask(some.chunks[i]);
    }
};

// Keys to columns: to [padded / numbers, kTile].
template <class Cache, class Operand, bool Full>
void pack_keys(
    const typename Cache::Element *keys, const TileRows &rows, int64_t count, int64_t head_size, float *to, Prefetch &ahead
) {
    const int64_t depth = padded(head_size) / Operand::kNumbers;
    for (int64_t key = 0; key < count; key += kLanes) {
        ahead.issue(kLanes * 3 / 8);
        for (int64_t d = 0; d < depth; d += kLanes) {
            Floats x[kLanes];
            UNROLL for (int i = 0; i < kLanes; ++i)
                x[i] = load_part<Cache, Operand, Full>(keys + rows.offsets[key + i], d * Operand::kNumbers, head_size);
            transpose(x);
            UNROLL for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kTile + key, x[i]);
        }
    }
}

// Values as they stand, several rows to an operand: to [count / numbers, padded].
template <class Cache, class Operand, bool Full>
void pack_values(
    const typename Cache::Element *values, const TileRows &rows, int64_t count, int64_t head_size, float *to, Prefetch &ahead
) {
    const int64_t width = padded(head_size);
    if constexpr (Operand::kNumbers == 1) {
        for (int64_t key = 0; key < count; ++key) {
            if (key % 2) ahead.issue(1);
            for (int64_t d = 0; d < width; d += kLanes)
                store(to + key * width + d, load_part<Cache, Operand, Full>(values + rows.offsets[key], d, head_size));
        }
    } else {
#if defined(MAGICDEC_AVX512)
        const __m512i low = _mm512_load_si512(kPairOrder.indices), high = _mm512_load_si512(kPairOrder.indices + 32);
        for (int64_t key = 0; key < count; key += 2) {
            ahead.issue(1);
            for (int64_t d = 0; d < width; d += 32) {
                const __m512i first = (__m512i)load_part<Cache, Operand, Full>(values + rows.offsets[key], d, head_size);
                const __m512i second = (__m512i)load_part<Cache, Operand, Full>(values + rows.offsets[key + 1], d, head_size);
                store(to + key / 2 * width + d, (Floats)_mm512_permutex2var_epi16(first, low, second));
                store(to + key / 2 * width + d + 16, (Floats)_mm512_permutex2var_epi16(first, high, second));
            }
        }
#endif
    }
}

} // namespace
} // namespace magicdec::ISA
