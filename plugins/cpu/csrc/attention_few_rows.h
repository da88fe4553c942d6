// Attention of few rows: plain decoding and drafting, mostly. So few rows are multiplied faster than keys and values can be
// stored in the order of a product, so keys are put in order while those before them are multiplied, and values are
// multiplied as they are read. Every sum is the one that `multiply_parts` makes, in the same order.
//
// What limits these loops is how far ahead the CPU reads. They stay with a split's keys and then with its values, instead
// of changing between the two from tile to tile, and do nothing between that does not read: a tile's softmax is made while
// the values of the one before it are read. They ask for lines by few instructions at steps of 256 bytes or less, for it is
// by the instruction that the CPU sees what will be asked for next: eight unrolled ones reach three quarters.
#pragma once

#include "attention_tiles.h"

#if defined(MAGICDEC_AVX512)

namespace magicdec::ISA {
namespace {

constexpr int64_t kFewRows = 6; // at most: their sums fill the registers

// Where the entries of a split stand, a group of neighbours each: elements from the first slot of a KV head on.
struct EntryGroups {
    static constexpr int64_t kEntries = kLanes; // of a group; divides the block size
    int64_t offsets[kMaxSplit / kEntries];

    // Groups from `start` on, a group's first entry: `count` entries; then, up to `end`, the first of them again.
    void find(const AttentionSequence &sequence, const AttentionArgs &args, int64_t start, int64_t count, int64_t end) {
        int64_t block = start / args.block_size, offset = start % args.block_size, i = 0;
        for (; i * kEntries < count; ++i, offset += kEntries) {
            if (offset == args.block_size) ++block, offset = 0;
            offsets[i] = (sequence.blocks[block] * args.block_size + offset) * args.head_size;
        }
        for (; i * kEntries < end; ++i) offsets[i] = offsets[0];
    }
};

// A split's keys and values, and the keys that will be read after them. What stands in a group behind the split's end may
// be anything: its scores have no part in anything, and values there are not read.
template <int HeadSize> struct FewRows {
    static constexpr int64_t kKeys = 64;                         // come together
    static constexpr int64_t kKeysAhead = 64, kValuesAhead = 48; // from a row to the one that is asked for with it
    static constexpr int kDepth = HeadSize / 2, kLine = 32, kLines = HeadSize / kLine; // pairs; numbers; lines of a row
    static_assert(HeadSize % (2 * kLine) == 0 && kTile % kKeys == 0 && kMaxSplit % kTile == 0);
    static constexpr int64_t kOrdered = 2 * kLanes * kKeys; // floats
    // What a thread of the other kernel has is room enough: `ordered` in its tile, scores of a split in those of a tile.
    static_assert(kOrdered <= kTile * HeadSize && kFewRows * kMaxSplit <= kGroupRows * kTile);

    const uint16_t *keys, *values, *next_keys;
    const int64_t *groups, *next_groups; // their offsets, of `padded` and of kKeys entries
    int64_t count, padded;               // entries; the same, rounded up to a multiple of kKeys

    // scores [padded / kTile, Rows, kTile] = query [Rows, kDepth] times the keys. ordered: kOrdered.
    template <int Rows> __attribute__((noinline)) void score(const float *query, float *ordered, float *scores) const {
        constexpr int kVectors = Rows <= 3 ? 4 : 2, kStep = kVectors * kLanes;
        const int64_t units = padded / kStep * kLines;
        Floats sums[Rows][kVectors];
        clear(sums);
        score_unit<Rows, kVectors, false, true>(0, query, ordered, sums);
        for (int64_t unit = 1; unit < units; ++unit) {
            score_unit<Rows, kVectors, true, true>(unit, query, ordered, sums);
            if (unit % kLines == 0) write(sums, (unit / kLines - 1) * kStep, scores), clear(sums);
        }
        score_unit<Rows, kVectors, true, false>(units, query, ordered, sums);
        write(sums, padded - kStep, scores);
    }

    static constexpr int kAsides = kTile / kLanes * (HeadSize / (2 * kLine));
    // sums [Rows, HeadSize] = keep [Rows] * sums + weights [Rows, kTile] times the tile's values. Meanwhile aside(0), ..,
    // aside(kAsides - 1) where the tile is full: this loop waits for memory.
    template <int Rows, class Aside>
    __attribute__((noinline)) void weigh(int64_t tile, const float *weights, const float *keep, float *sums, const Aside &aside) const {
        const int64_t start = tile * kTile, end = std::min(start + kTile, padded);
        int64_t call = 0;
        for (int d = 0; d < HeadSize; d += 2 * kLine) {
            Floats totals[Rows][4];
            UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < 4; ++v) totals[r][v] = Floats{};
            for (int64_t key = start; key < end; key += kGroup) {
                const uint16_t *group = values + groups[key / kGroup] + d, *asked = line_of(values, next_keys, key + kValuesAhead) + d;
                const int64_t last = std::clamp<int64_t>(count - 1 - key, 0, kGroup - 1); // behind it there may be anything
                const float *weight = weights + (key - start) / 2;
                aside(call++);
                _Pragma("GCC unroll 1") for (int64_t k = 0; k < kGroup; k += 2) {
                    UNROLL for (int i = 0; i < 4; ++i) ask(asked + (k + i / 2) * HeadSize + i % 2 * kLine);
                    Floats right[4];
                    UNROLL for (int i = 0; i < 2; ++i) {
                        const __m512i first = (__m512i)load(group + std::min(k, last) * HeadSize + i * kLine);
                        const __m512i second = (__m512i)load(group + std::min(k + 1, last) * HeadSize + i * kLine);
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
    static constexpr int64_t kGroup = EntryGroups::kEntries;

    // The first line of the group of entry `at` of `here`, or, behind the last one, of what comes then.
    const uint16_t *line_of(const uint16_t *here, const uint16_t *then, int64_t at) const {
        if (at < padded) return here + groups[at / kGroup];
        return then + (here == keys ? groups : next_groups)[(at - padded) / kGroup];
    }

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

    template <int Rows, int Vectors> __attribute__((always_inline)) static void clear(Floats (&sums)[Rows][Vectors]) {
        UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v) sums[r][v] = Floats{};
    }

    template <int Rows, int Vectors>
    __attribute__((always_inline)) static void write(const Floats (&sums)[Rows][Vectors], int64_t key, float *scores) {
        float *to = scores + key / kTile * (Rows * kTile) + key % kTile;
        UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v) store(to + r * kTile + v * kLanes, sums[r][v]);
    }

    // A unit: one line of Vectors * kLanes keys, that is kLanes pairs of each. It is put in order while the one before it is
    // multiplied: the two keep different parts of the core busy.
    template <int Rows, int Vectors, bool Before, bool Here>
    __attribute__((always_inline)) void score_unit(int64_t unit, const float *query, float *ordered, Floats (&sums)[Rows][Vectors]) const {
        constexpr int kStep = Vectors * kLanes, kSize = kLanes * kStep;
        static_assert(2 * kSize <= kOrdered);
        const int64_t key = unit / kLines * kStep, part = unit % kLines;
        const float *left = query + (unit + kLines - 1) % kLines * kLanes, *right = ordered + (unit + 1) % 2 * kSize;
        for (int64_t vector = 0; vector < Vectors; ++vector) {
            const uint16_t *line = nullptr;
            if constexpr (Here) {
                const uint16_t *group = keys + groups[key / kGroup + vector] + part * kLine;
                float *to = ordered + unit % 2 * kSize + vector * kLanes;
                Floats x[kLanes];
                UNROLL for (int i = 0; i < kLanes; ++i) x[i] = load(group + i * HeadSize);
                transpose(x);
                UNROLL for (int i = 0; i < kLanes; ++i) store(to + i * kStep, x[i]);
                const int64_t asked = part * Vectors + vector; // lines are asked for as they stand, a group's lines at a time
                line = line_of(keys, values, key + kKeysAhead + asked / kLines * kGroup) + asked % kLines * kGroup * kLine;
            }
            int steps = kLanes / Vectors;
            asm("" : "+r"(steps)); // or the compiler unrolls
            for (; steps > 0; --steps, ++left, right += kStep, line += Vectors * kLine) {
                if constexpr (Here) {
                    UNROLL for (int i = 0; i < Vectors; ++i) ask(line + i * kLine);
                }
                if constexpr (Before) {
                    Floats x[Vectors];
                    UNROLL for (int v = 0; v < Vectors; ++v) x[v] = load(right + v * kLanes);
                    UNROLL for (int r = 0; r < Rows; ++r) UNROLL for (int v = 0; v < Vectors; ++v)
                        sums[r][v] = Pair::add_product(sums[r][v], all(left[r * kDepth]), x[v]);
                }
            }
        }
    }
};

} // namespace
} // namespace magicdec::ISA

#endif
