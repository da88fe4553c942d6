// Attention of a few or of many query rows over pages of keys and values, at the memory's speed and at that of a matrix
// product. See attention.h for what makes a row's result its own.
//
// A tile of keys and one of values are put once into the order that `multiply` reads and then serve all rows: the query
// rows of one sequence times the heads that share the KV head.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "isa.h"
#include "kernels.h"
#include "simd.h"

namespace magicdec::ISA {
namespace {

constexpr float kNothing = -1e30f; // the maximum of no scores: finite, so that differences are numbers
constexpr int64_t kAlign = 32;     // the keys of a tile are padded to a multiple of this with masked ones

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

template <class Cache, class Operand>
inline Floats load_part(const typename Cache::Element *row, int64_t at, int64_t head_size) {
    constexpr int64_t kCount = kLanes * Operand::kNumbers;
    if (at + kCount <= head_size) return Loader<Cache, Operand>::load(row + at);
    typename Cache::Element part[kCount] = {};
    if (at < head_size) std::memcpy(part, row + at, static_cast<size_t>(head_size - at) * sizeof part[0]);
    return Loader<Cache, Operand>::load(part);
}

// One sequence's keys or values of a KV head, and where a tile of them stands.
template <class Cache> struct Pages {
    typedef typename Cache::Element Element;
    const Element *rows[kTile];

    // Rows of entries start .. start + count, and of zeros up to `end`.
    void find(
        const Element *cache, const AttentionSequence &sequence, const AttentionArgs &args, int64_t start, int64_t count,
        int64_t end
    ) {
        static const Element zeros[kMaxHeadSize] = {};
        const int64_t block_size = args.block_size, head_size = args.head_size;
        int64_t block = start / block_size, offset = start % block_size;
        for (int64_t i = 0; i < count; ++block, offset = 0) {
            const Element *row = cache + (sequence.blocks[block] * block_size + offset) * head_size;
            for (const int64_t stop = std::min(count, i + block_size - offset); i < stop; ++i, row += head_size) rows[i] = row;
        }
        for (int64_t i = count; i < end; ++i) rows[i] = zeros;
    }
};

// Keys to columns: to [padded / numbers, kTile].
template <class Cache, class Operand>
void pack_keys(const Pages<Cache> &pages, int64_t count, int64_t head_size, float *to) {
    const int64_t depth = padded(head_size) / Operand::kNumbers;
    for (int64_t key = 0; key < count; key += kLanes)
        for (int64_t d = 0; d < depth; d += kLanes) {
            Floats x[kLanes];
            UNROLL for (int i = 0; i < kLanes; ++i)
                x[i] = load_part<Cache, Operand>(pages.rows[key + i], d * Operand::kNumbers, head_size);
            transpose(x);
            UNROLL for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kTile + key, x[i]);
        }
}

// Values as they stand, several rows to an operand: to [count / numbers, padded].
template <class Cache, class Operand>
void pack_values(const Pages<Cache> &pages, int64_t count, int64_t head_size, float *to) {
    const int64_t width = padded(head_size);
    if constexpr (Operand::kNumbers == 1) {
        for (int64_t key = 0; key < count; ++key)
            for (int64_t d = 0; d < width; d += kLanes)
                store(to + key * width + d, load_part<Cache, Operand>(pages.rows[key], d, head_size));
    } else {
#if defined(MAGICDEC_AVX512)
        const __m512i low = _mm512_load_si512(kPairOrder.indices), high = _mm512_load_si512(kPairOrder.indices + 32);
        for (int64_t key = 0; key < count; key += 2)
            for (int64_t d = 0; d < width; d += 32) {
                const __m512i first = (__m512i)load_part<Cache, Operand>(pages.rows[key], d, head_size);
                const __m512i second = (__m512i)load_part<Cache, Operand>(pages.rows[key + 1], d, head_size);
                store(to + key / 2 * width + d, (Floats)_mm512_permutex2var_epi16(first, low, second));
                store(to + key / 2 * width + d + 16, (Floats)_mm512_permutex2var_epi16(first, high, second));
            }
#endif
    }
}

// Query rows as operands: to [rows, padded / numbers].
template <class Query, class Operand>
void pack_query(const AttentionArgs &args, const AttentionSequence &sequence, const AttentionItem &item, float *to) {
    const int64_t group = args.num_heads / args.num_kv_heads, depth = padded(args.head_size) / Operand::kNumbers;
    for (int64_t r = 0; r < item.rows; ++r) {
        const int64_t row = sequence.first_row + (item.first + r) / group, head = item.kv_head * group + (item.first + r) % group;
        const auto *from = static_cast<const typename Query::Element *>(args.query) + row * args.query_stride + head * args.head_size;
        for (int64_t d = 0; d < depth; d += kLanes)
            store(to + r * depth + d, load_part<Query, Operand>(from, d * Operand::kNumbers, args.head_size));
    }
}

constexpr int64_t kDepth = 32; // operands of a score that are summed at a time

struct Ones {
    float factors[kGroupRows];
    constexpr Ones() : factors() {
        for (float &factor : factors) factor = 1;
    }
};
constexpr Ones kOnes;

// Running softmax of `rows` rows: sums [rows, padded], maxima and denominators [rows].
struct State {
    float *sums, *maxima, *denominators;

    State(float *memory, int64_t rows, int64_t width)
        : sums(memory), maxima(memory + rows * width), denominators(maxima + rows) {}

    void clear(int64_t rows, int64_t width) const {
        std::memset(sums, 0, static_cast<size_t>(rows * width) * sizeof(float));
        for (int64_t r = 0; r < rows; ++r) maxima[r] = kNothing, denominators[r] = 0;
    }
};

float exp_of(float x) { return exp(all(x))[0]; }

// Adds the next split.
void merge(const State &state, const State &split, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
        const float top = std::max(state.maxima[r], split.maxima[r]);
        const float keep = exp_of(state.maxima[r] - top), take = exp_of(split.maxima[r] - top);
        state.maxima[r] = top;
        state.denominators[r] = state.denominators[r] * keep + split.denominators[r] * take;
        float *sums = state.sums + r * width;
        for (int64_t d = 0; d < width; d += kLanes)
            store(sums + d, fma(load(sums + d), all(keep), load(split.sums + r * width + d) * all(take)));
    }
}

template <class Query> void write(const AttentionArgs &args, const AttentionItem &item, const State &state) {
    const AttentionSequence &sequence = args.sequences[item.sequence];
    const int64_t group = args.num_heads / args.num_kv_heads, head_size = args.head_size, width = padded(head_size);
    for (int64_t r = 0; r < item.rows; ++r) {
        const int64_t row = sequence.first_row + (item.first + r) / group, head = item.kv_head * group + (item.first + r) % group;
        auto *to = static_cast<typename Query::Element *>(args.out) + row * args.out_stride + head * head_size;
        const Floats factor = all(args.value_scale / state.denominators[r]);
        for (int64_t d = 0; d < head_size; d += kLanes) {
            const Floats x = load(state.sums + r * width + d) * factor;
            if (d + kLanes <= head_size) {
                Query::narrow(to + d, x);
            } else {
                typename Query::Element part[kLanes];
                Query::narrow(part, x);
                std::memcpy(to + d, part, static_cast<size_t>(head_size - d) * sizeof part[0]);
            }
        }
    }
}

// One thread's attention.
template <class Query, class Cache, class Operand> class Worker {
  public:
    Worker(const AttentionArgs &args, float *memory)
        : args_(args), group_(args.num_heads / args.num_kv_heads), width_(padded(args.head_size)), query_(memory),
          keys_(query_ + kGroupRows * width_), values_(keys_ + kTile * width_), scores_(values_ + kTile * width_),
          denominators_(scores_ + kGroupRows * kTile), factors_(denominators_ + kGroupRows * kLanes),
          state_(factors_ + kGroupRows + 16), split_(state_ + kGroupRows * (width_ + 2)) {}

    void run(const AttentionItem &item) {
        const AttentionSequence &sequence = args_.sequences[item.sequence];
        pack_query<Query, Operand>(args_, sequence, item, query_);
        if (item.split >= 0) return run_split(sequence, item, item.split, State(item.partial, item.rows, width_));
        const State state(state_, item.rows, width_), split(split_, item.rows, width_);
        state.clear(item.rows, width_);
        const int64_t splits = num_splits(length(sequence, item));
        for (int64_t index = 0; index < splits; ++index) {
            run_split(sequence, item, index, split);
            merge(state, split, item.rows, width_);
        }
        write<Query>(args_, item, state);
    }

    // The splits of a (sequence, KV head) that `item` is the last of to be finished.
    void finish(const AttentionPlan &plan, const AttentionItem &item) {
        const State state(state_, item.rows, width_);
        state.clear(item.rows, width_);
        const AttentionMerge &splits = plan.merges[item.merge];
        for (int64_t index = 0; index < splits.num_items; ++index)
            merge(state, State(plan.partials[splits.first_item + index], item.rows, width_), item.rows, width_);
        write<Query>(args_, item, state);
    }

  private:
    // Entries that the last row of the item may see.
    int64_t length(const AttentionSequence &sequence, const AttentionItem &item) const {
        return sequence.cache_len + (sequence.tree ? sequence.num_rows : (item.first + item.rows - 1) / group_ + 1);
    }

    void run_split(const AttentionSequence &sequence, const AttentionItem &item, int64_t split, const State &state) {
        state.clear(item.rows, width_);
        std::memset(denominators_, 0, static_cast<size_t>(item.rows * kLanes) * sizeof(float));
        const int64_t end = std::min(split_start(split + 1), length(sequence, item));
        for (int64_t start = split_start(split); start < end; start += kTile)
            run_tile(sequence, item, start, std::min(kTile, end - start), state);
        for (int64_t r = 0; r < item.rows; ++r) state.denominators[r] = sum(load(denominators_ + r * kLanes));
    }

    void run_tile(const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t count, const State &state) {
        const int64_t padded_count = round_up(count, kAlign), depth = width_ / Operand::kNumbers;
        const int64_t skipped = first_row(sequence, item, start), rows = item.rows - skipped;
        pack(sequence, item, start, count, padded_count);
        float *scores = scores_ + skipped * kTile;
        for (int64_t d = 0; d < depth; d += kDepth) // long sums of float32 in parts: their errors grow with the length
            multiply<Operand>(
                rows, padded_count / kLanes, query_ + skipped * depth + d, depth, keys_ + d * kTile, kTile,
                std::min(depth - d, kDepth), d == 0 ? nullptr : kOnes.factors, scores, kTile
            );
        mask(sequence, item, start, padded_count, skipped);
        for (int64_t r = skipped; r < item.rows; ++r) find_maximum(r, padded_count, state);
        for (int64_t r = skipped; r < item.rows; r += kLanes) store(factors_ + r, exp(load(factors_ + r)));
        for (int64_t r = skipped; r < item.rows; ++r) exponentiate(r, padded_count, state);
        multiply<Operand>(
            rows, round_up(args_.head_size, kLanes) / kLanes, scores, kTile, values_, width_, padded_count / Operand::kNumbers,
            factors_ + skipped, state.sums + skipped * width_, width_
        );
    }

    void pack(const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t count, int64_t padded_count) {
        typedef typename Cache::Element Element;
        Pages<Cache> pages;
        const int64_t head = item.kv_head * args_.head_stride;
        pages.find(static_cast<const Element *>(args_.keys) + head, sequence, args_, start, count, padded_count);
        pack_keys<Cache, Operand>(pages, padded_count, args_.head_size, keys_);
        pages.find(static_cast<const Element *>(args_.values) + head, sequence, args_, start, count, padded_count);
        pack_values<Cache, Operand>(pages, padded_count, args_.head_size, values_);
    }

    // The first row of the item that may see entries from `start` on.
    int64_t first_row(const AttentionSequence &sequence, const AttentionItem &item, int64_t start) const {
        if (sequence.tree) return 0;
        return std::max<int64_t>(0, (start - sequence.cache_len) * group_ - item.first);
    }

    // Scores of entries that a row may not see: minus infinity.
    void mask(const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t count, int64_t skipped) {
        const int64_t end = sequence.cache_len + sequence.num_rows;
        if (start + count <= sequence.cache_len + item.first / group_ + 1 && !(sequence.tree && start + count > sequence.cache_len))
            return;
        for (int64_t r = skipped; r < item.rows; ++r) {
            const int64_t row = (item.first + r) / group_;
            float *scores = scores_ + r * kTile - start;
            if (sequence.tree) {
                const uint8_t *seen = sequence.tree + row * sequence.num_rows - sequence.cache_len;
                for (int64_t p = std::max(start, sequence.cache_len); p < std::min(start + count, end); ++p)
                    if (!seen[p]) scores[p] = -INFINITY;
            }
            const int64_t visible = sequence.tree ? end : sequence.cache_len + row + 1;
            for (int64_t p = std::max(start, visible); p < start + count; ++p) scores[p] = -INFINITY;
        }
    }

    // The new maximum, and the exponent of what the old one's sums are worth.
    void find_maximum(int64_t r, int64_t count, const State &state) {
        const float *scores = scores_ + r * kTile;
        Floats top = load(scores);
        for (int64_t i = kLanes; i < count; i += kLanes) top = max(top, load(scores + i));
        const float maximum = std::max(state.maxima[r], greatest(top));
        factors_[r] = state.maxima[r] - maximum;
        state.maxima[r] = maximum;
    }

    // Scores to weights, as operands from the row's beginning on.
    void exponentiate(int64_t r, int64_t count, const State &state) {
        float *scores = scores_ + r * kTile, *denominator = denominators_ + r * kLanes;
        const Floats maximum = all(state.maxima[r]);
        Floats total = load(denominator) * all(factors_[r]);
        constexpr int kStep = Operand::kNumbers * kLanes;
        for (int64_t i = 0; i < count; i += kStep) {
            Floats weights[Operand::kNumbers];
            UNROLL for (int part = 0; part < Operand::kNumbers; ++part) {
                weights[part] = exp(load(scores + i + part * kLanes) - maximum);
                total += weights[part];
            }
            store(scores + i / Operand::kNumbers, pack_weights(weights));
        }
        store(denominator, total);
    }

    static Floats pack_weights(const Floats (&weights)[1]) { return weights[0]; }
#if defined(MAGICDEC_AVX512)
    static Floats pack_weights(const Floats (&weights)[2]) { return (Floats)_mm512_cvtne2ps_pbh(weights[1], weights[0]); }
#endif

    const AttentionArgs &args_;
    const int64_t group_, width_;
    float *query_, *keys_, *values_, *scores_, *denominators_, *factors_, *state_, *split_;
};

template <class Query, class Cache, class Operand>
void work(const AttentionArgs &args, AttentionPlan &plan, const Team &team) {
    Worker<Query, Cache, Operand> worker(args, plan.thread_memory + team.index * plan.thread_size);
    const int64_t count = static_cast<int64_t>(plan.items.size());
    int64_t index;
    while ((index = plan.next.fetch_add(1, std::memory_order_relaxed)) < count) {
        const AttentionItem &item = plan.items[index];
        worker.run(item);
        if (item.merge < 0) continue;
        std::atomic<int64_t> &remaining = plan.remaining[item.merge];
        if (remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        remaining.store(plan.merges[item.merge].num_items, std::memory_order_relaxed); // for the next layer
        worker.finish(plan, item);
    }
    // Each thread fails once; the last leaves the plan as it found it.
    if (index == count + team.count - 1) plan.next.store(0, std::memory_order_relaxed);
}

template <class Query, class Operand> void work(const AttentionArgs &args, AttentionPlan &plan, const Team &team) {
    if (args.cache_type == kFloat8) return work<Query, Float8, Operand>(args, plan, team);
    return work<Query, Query, Operand>(args, plan, team);
}

} // namespace

#if defined(MAGICDEC_AVX512)
typedef Pair BFloat16Operand;
#else
typedef Single BFloat16Operand;
#endif

void attention(const AttentionArgs &args, AttentionPlan &plan, const Team &team) {
    if (args.query_type == kBFloat16) return work<BFloat16, BFloat16Operand>(args, plan, team);
    if (args.query_type == kFloat16) return work<Float16, Single>(args, plan, team);
    return work<Float32, Single>(args, plan, team);
}

} // namespace magicdec::ISA
