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

// Full: no row ends between them.
template <class Cache, class Operand, bool Full = false>
inline Floats load_part(const typename Cache::Element *row, int64_t at, int64_t head_size) {
    constexpr int64_t kCount = kLanes * Operand::kNumbers;
    if (Full || at + kCount <= head_size) return Loader<Cache, Operand>::load(row + at);
    typename Cache::Element part[kCount] = {};
    if (at < head_size) std::memcpy(part, row + at, static_cast<size_t>(head_size - at) * sizeof part[0]);
    return Loader<Cache, Operand>::load(part);
}

// Where the rows of a tile stand, in elements from the first slot of a KV head on.
struct TileRows {
    int64_t offsets[kTile];

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
        ahead.issue(kLanes / 4);
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
          tile_(query_ + kGroupRows * width_), scores_(tile_ + kTile * width_),
          denominators_(scores_ + kGroupRows * kTile), factors_(denominators_ + kGroupRows * kLanes),
          state_(factors_ + kGroupRows + 16), split_(state_ + kGroupRows * (width_ + 2)) {}

    // following: the item that is likely to come next, or null.
    void run(const AttentionItem &item, const AttentionItem *following) {
        const AttentionSequence &sequence = args_.sequences[item.sequence];
        following_ = following;
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
    typedef typename Cache::Element Element;

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
        const int64_t padded_count = round_up(count, kAlign), depth = width_ / Operand::kNumbers, head_size = args_.head_size;
        const int64_t skipped = first_row(sequence, item, start), rows = item.rows - skipped;
        const Element *keys = head(args_.keys, item), *values = head(args_.values, item);
        rows_.find(sequence, args_, start, count, padded_count);

        ahead_.plan(values, rows_, count, head_size);
        (full_ ? pack_keys<Cache, Operand, true> : pack_keys<Cache, Operand, false>)(
            keys, rows_, padded_count, head_size, tile_, ahead_
        );
        float *scores = scores_ + skipped * kTile;
        const float *query = query_ + skipped * depth;
        multiply_parts<Operand>(
            rows, padded_count / kLanes, {query, depth, tile_, kTile, depth, nullptr, scores, kTile}, ahead_,
            ahead_.left() - ahead_.count / 4
        );
        mask(sequence, item, start, padded_count, skipped);
        const int64_t share = ahead_.left() / (2 * rows) + 1;
        for (int64_t r = skipped; r < item.rows; ++r) find_maximum(r, padded_count, state), ahead_.issue(share);
        for (int64_t r = skipped; r < item.rows; r += kLanes) store(factors_ + r, exp(load(factors_ + r)));
        for (int64_t r = skipped; r < item.rows; ++r) exponentiate(r, padded_count, state), ahead_.issue(share);

        plan_next_keys(sequence, item, start + count);
        (full_ ? pack_values<Cache, Operand, true> : pack_values<Cache, Operand, false>)(
            values, rows_, padded_count, head_size, tile_, ahead_
        );
        const Product product = {
            scores, kTile, tile_, width_, padded_count / Operand::kNumbers, factors_ + skipped, state.sums + skipped * width_, width_
        };
        multiply_parts<Operand>(rows, round_up(head_size, kLanes) / kLanes, product, ahead_, ahead_.left());
    }

    // Ask for the keys of the tile that comes after this one: of this item, or of the next.
    void plan_next_keys(const AttentionSequence &sequence, const AttentionItem &item, int64_t start) {
        const bool here = start < (item.split < 0 ? length(sequence, item) : std::min(split_start(item.split + 1), length(sequence, item)));
        if (!here && following_ == nullptr) return ahead_.clear();
        const AttentionItem &next = here ? item : *following_;
        const AttentionSequence &its = args_.sequences[next.sequence];
        const int64_t first = here ? start : next.split < 0 ? 0 : split_start(next.split);
        const int64_t count = std::min(kTile, length(its, next) - first);
        next_rows_.find(its, args_, first, count, count);
        ahead_.plan(head(args_.keys, next), next_rows_, count, args_.head_size);
    }

    const Element *head(const void *cache, const AttentionItem &item) const {
        return static_cast<const Element *>(cache) + item.kv_head * args_.head_stride;
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
    const bool full_ = args_.head_size == width_;
    const AttentionItem *following_ = nullptr;
    TileRows rows_, next_rows_;
    Prefetch ahead_;
    float *query_, *tile_, *scores_, *denominators_, *factors_, *state_, *split_;
};

template <class Query, class Cache, class Operand>
int64_t work(const AttentionArgs &args, AttentionPlan &plan, const Team &team, std::atomic<int64_t> &next) {
    Worker<Query, Cache, Operand> worker(args, plan.thread_memory + team.index * plan.thread_size);
    const int64_t count = static_cast<int64_t>(plan.items.size());
    int64_t index, done = 0;
    for (; (index = next.fetch_add(1, std::memory_order_relaxed)) < count; ++done) {
        const AttentionItem &item = plan.items[index];
        const int64_t following = next.load(std::memory_order_relaxed);
        worker.run(item, following < count ? &plan.items[following] : nullptr);
        if (item.merge < 0) continue;
        std::atomic<int64_t> &remaining = plan.remaining[item.merge];
        if (remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        remaining.store(plan.merges[item.merge].num_items, std::memory_order_relaxed); // for the next layer
        worker.finish(plan, item);
    }
    return done;
}

template <class Query, class Operand>
int64_t work(const AttentionArgs &args, AttentionPlan &plan, const Team &team, std::atomic<int64_t> &next) {
    if (args.cache_type == kFloat8) return work<Query, Float8, Operand>(args, plan, team, next);
    return work<Query, Query, Operand>(args, plan, team, next);
}

} // namespace

#if defined(MAGICDEC_AVX512)
typedef Pair BFloat16Operand;
#else
typedef Single BFloat16Operand;
#endif

int64_t attention(const AttentionArgs &args, AttentionPlan &plan, const Team &team, std::atomic<int64_t> &next) {
    if (args.query_type == kBFloat16) return work<BFloat16, BFloat16Operand>(args, plan, team, next);
    if (args.query_type == kFloat16) return work<Float16, Single>(args, plan, team, next);
    return work<Float32, Single>(args, plan, team, next);
}

} // namespace magicdec::ISA
