// Attention of few rows: plain decoding and drafting, mostly. So few rows are multiplied faster than keys and values can be
// stored in the order of a product, so keys are put in order while those before them are multiplied, and values are
// multiplied as they are read. Every sum is the one that `multiply_parts` makes, in the same order.
//
// What limits these loops is how far ahead the CPU reads. They stay with a split's keys and then with its values, instead
// of changing between the two from tile to tile; and they ask for lines by few instructions at steps of 256 bytes or less,
// for it is by the instruction that the CPU sees what will be asked for next: eight unrolled ones reach three quarters.
#pragma once

#include "attention_tiles.h"

#if defined(MAGICDEC_AVX512)

namespace magicdec::ISA {
namespace {

constexpr int64_t kFewRows = 6; // at most: their sums fill the registers

// A split's keys and values, and the keys that will be read after them.
template <int HeadSize> struct FewRows {
    static constexpr int64_t kKeys = 64;                         // come together
    static constexpr int64_t kKeysAhead = 64, kValuesAhead = 48; // from a row to the one that is asked for with it
    static constexpr int kDepth = HeadSize / 2, kLine = 32, kLines = HeadSize / kLine; // pairs; numbers; lines of a row
    static_assert(HeadSize % (2 * kLine) == 0 && kTile % kKeys == 0 && kMaxSplit % kTile == 0);
    // What a thread of the other kernel has is room enough: `ordered` in its tile, scores of a split in those of a tile.
    static_assert(2 * kDepth * kKeys <= kTile * HeadSize && kFewRows * kMaxSplit <= kGroupRows * kTile);

    const uint16_t *keys, *values, *next_keys;
    const int64_t *offsets, *next_offsets; // of rows: [count], [kKeys]
    int64_t count;                         // a multiple of kKeys

    // scores [count / kTile, Rows, kTile] = query [Rows, kDepth] times the keys. ordered: 2 * kDepth * kKeys.
    template <int Rows> __attribute__((noinline)) void score(const float *query, float *ordered, float *scores) const {
        constexpr int kVectors = Rows <= 3 ? 4 : 2, kStep = kVectors * kLanes;
        score_keys<Rows, kVectors, false, true>(0, query, ordered, scores);
        for (int64_t key = kStep; key < count; key += kStep) score_keys<Rows, kVectors, true, true>(key, query, ordered, scores);
        score_keys<Rows, kVectors, true, false>(count, query, ordered, scores);
    }

    // sums [Rows, HeadSize] = keep [Rows] * sums + weights [Rows, kTile] times the tile's values.
    template <int Rows>
    __attribute__((noinline)) void weigh(int64_t tile, const float *weights, const float *keep, float *sums) const {
        constexpr int kStep = kLanes;
        const int64_t start = tile * kTile, end = std::min(start + kTile, count);
        for (int d = 0; d < HeadSize; d += 2 * kLine) {
            Floats totals[Rows][4];
            UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < 4; ++v) totals[r][v] = Floats{};
            for (int64_t key = start; key < end; key += kStep) {
                const int64_t ahead = key + kValuesAhead;
                const uint16_t *from = (ahead < count ? values : next_keys) + d;
                const int64_t *row = offsets + key, *asked = ahead < count ? offsets + ahead : next_offsets + (ahead - count);
                const float *weight = weights + (key - start) / 2;
                _Pragma("GCC unroll 1") for (int k = 0; k < kStep; k += 2) {
                    UNROLL for (int i = 0; i < 4; ++i) ask(from + asked[k + i / 2] + i % 2 * kLine);
                    Floats right[4];
                    UNROLL for (int i = 0; i < 2; ++i) {
                        const __m512i first = (__m512i)load(values + row[k] + d + i * kLine);
                        const __m512i second = (__m512i)load(values + row[k + 1] + d + i * kLine);
                        right[2 * i] = (Floats)_mm512_unpacklo_epi16(first, second);
                        right[2 * i + 1] = (Floats)_mm512_unpackhi_epi16(first, second);
                    }
                    UNROLL for (int r = 0; r < Rows; ++r) {
                        const Floats left = all(weight[r * kTile + k / 2]);
                        UNROLL for (int v = 0; v < 4; ++v) totals[r][v] = Pair::add_product(totals[r][v], left, right[v]);
                    }
                }
            }
            UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int i = 0; i < 2; ++i)
                add(keep[r], totals[r][2 * i], totals[r][2 * i + 1], sums + r * HeadSize + d + i * kLine);
        }
    }

  private:
    // Always inline: a call that does nothing else would be taken for one that does nothing.
    __attribute__((always_inline)) static void ask(const uint16_t *line) { __builtin_prefetch(line); }

    // low, high: the lower and the upper four of each eight numbers.
    __attribute__((always_inline)) static void add(float keep, Floats low, Floats high, float *to) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        const auto put = [&](float *part, __m512i order) __attribute__((always_inline)) {
            store(part, fma(all(keep), load(part), (Floats)_mm512_permutex2var_epi64((__m512i)low, order, (__m512i)high)));
        };
        put(to, first), put(to + kLanes, second);
    }

    // Scores of the Vectors * kLanes keys before `key`, while those from `key` on are put in order: the two keep different
    // parts of the core busy.
    template <int Rows, int Vectors, bool Before, bool Here>
    __attribute__((always_inline)) void score_keys(int64_t key, const float *query, float *ordered, float *scores) const {
        constexpr int kStep = Vectors * kLanes, kParts = kDepth / kLanes;
        const int64_t half = key / kStep % 2 * (kDepth * kStep), other = kDepth * kStep - half, ahead = key + kKeysAhead;
        const uint16_t *from = ahead < count ? keys : values;
        const int64_t *asked = offsets + (ahead < count ? ahead : ahead - count);
        const float *left = query, *right = ordered + other;
        Floats sums[Rows][Vectors];
        UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v) sums[r][v] = Floats{};
        int line = 0;
        for (int part = 0; part < Vectors * kParts; ++part) {
            if constexpr (Here) {
                const int vector = part / kParts, d = part % kParts * kLanes;
                Floats x[kLanes];
                UNROLL for (int i = 0; i < kLanes; ++i) x[i] = load(keys + offsets[key + vector * kLanes + i] + 2 * d);
                transpose(x);
                UNROLL for (int i = 0; i < kLanes; ++i) store(ordered + half + (d + i) * kStep + vector * kLanes, x[i]);
            }
            int steps = kLanes / Vectors;
            asm("" : "+r"(steps)); // or the compiler unrolls
            for (; steps > 0; --steps, ++left, right += kStep, line += Vectors) {
                if constexpr (Here) {
                    UNROLL for (int i = 0; i < Vectors; ++i) ask(from + asked[line / kLines + i / kLines] + (line + i) % kLines * kLine);
                }
                if constexpr (Before) {
                    UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v)
                        sums[r][v] = Pair::add_product(sums[r][v], all(left[r * kDepth]), load(right + v * kLanes));
                }
            }
        }
        if constexpr (Before) {
            const int64_t at = key - kStep;
            float *to = scores + at / kTile * (Rows * kTile) + at % kTile;
            UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v) store(to + r * kTile + v * kLanes, sums[r][v]);
        }
    }
};

} // namespace
} // namespace magicdec::ISA

#endif
