// Attention of a few or of many query rows over pages of keys and values, at the memory's speed and at that of a matrix
// product. See attention.h for what makes a row's result its own.
//
// A tile of keys and one of values are put once into the order that `multiply` reads and then serve all rows: the query
// rows of one sequence times the heads that share the KV head. Few rows have a kernel of their own: attention_few_rows.h.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "attention_few_rows.h"
#include "attention_products.h"
#include "attention_tiles.h"
#include "isa.h"
#include "kernels.h"
#include "simd.h"

namespace magicdec::ISA {
namespace {

constexpr float kNothing = -1e30f; // the maximum of no scores: finite, so that differences are numbers
constexpr int64_t kAlign = 32;     // the keys of a tile are padded to a multiple of this with masked ones

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
    // next: the index of the first of the plan's items that no thread has taken.
    Worker(const AttentionArgs &args, const AttentionPlan &plan, const std::atomic<int64_t> &next, float *memory)
        : args_(args), plan_(plan), next_(next), group_(args.num_heads / args.num_kv_heads), width_(padded(args.head_size)), query_(memory),
          tile_(query_ + kGroupRows * width_), scores_(tile_ + kTile * width_),
          denominators_(scores_ + kGroupRows * kTile), factors_(denominators_ + kGroupRows * kLanes),
          state_(factors_ + kGroupRows + 16), split_(state_ + kGroupRows * (width_ + 2)) {}

    void run(const AttentionItem &item) {
        const AttentionSequence &sequence = args_.sequences[item.sequence];
        pack_query<Query, Operand>(args_, sequence, item, query_);
        if (item.merge >= 0) {
            for (int64_t index = item.first_split; index < item.last_split; ++index)
                run_split(sequence, item, index, partial(item, index));
            return;
        }
        const State state(state_, item.rows, width_), split(split_, item.rows, width_);
        state.clear(item.rows, width_);
        for (int64_t index = item.first_split; index < item.last_split; ++index) {
            run_split(sequence, item, index, split);
            merge(state, split, item.rows, width_);
        }
        write<Query>(args_, item, state);
    }

    // The splits of a (sequence, KV head) that `item` is the last of to be finished.
    void finish(const AttentionItem &item) {
        const State state(state_, item.rows, width_);
        state.clear(item.rows, width_);
        const int64_t splits = plan_.merges[item.merge].num_splits;
        for (int64_t index = 0; index < splits; ++index) merge(state, partial(item, index), item.rows, width_);
        write<Query>(args_, item, state);
    }

  private:
    typedef typename Cache::Element Element;

    // The state of a split that is to be merged.
    State partial(const AttentionItem &item, int64_t split) const {
        return State(plan_.merges[item.merge].partials + split * partial_size(item.rows, args_.head_size), item.rows, width_);
    }

    // Entries that the last row of the item may see.
    int64_t length(const AttentionSequence &sequence, const AttentionItem &item) const {
        return sequence.cache_len + (sequence.tree ? sequence.num_rows : (item.first + item.rows - 1) / group_ + 1);
    }

    void run_split(const AttentionSequence &sequence, const AttentionItem &item, int64_t split, const State &state) {
        state.clear(item.rows, width_);
        std::memset(denominators_, 0, static_cast<size_t>(item.rows * kLanes) * sizeof(float));
        const int64_t first = split_start(split), end = std::min(split_start(split + 1), length(sequence, item));
        if (!run_few(sequence, item, first, end, state))
            for (int64_t start = first; start < end; start += kTile)
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
            ahead_.left() - ahead_.count / 8 // the rest while weights are made
        );
        scores_to_weights(sequence, item, start, padded_count, skipped, scores_, state);

        plan_next_keys(sequence, item, start + count);
        (full_ ? pack_values<Cache, Operand, true> : pack_values<Cache, Operand, false>)(
            values, rows_, padded_count, head_size, tile_, ahead_
        );
        const Product product = {
            scores, kTile, tile_, width_, padded_count / Operand::kNumbers, factors_ + skipped, state.sums + skipped * width_, width_
        };
        multiply_parts<Operand>(rows, round_up(head_size, kLanes) / kLanes, product, ahead_, ahead_.left());
    }

    // A split, if there is a kernel for so few rows.
    bool run_few(const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t end, const State &state) {
#if defined(MAGICDEC_AVX512)
        if constexpr (std::is_same_v<Cache, BFloat16>) {
            if (args_.block_size % kLanes != 0) return false;
            if (item.rows <= kFewRows && args_.head_size == 64) return run_few<64>(sequence, item, start, end, state);
            if (item.rows <= kFewRows && args_.head_size == 128) return run_few<128>(sequence, item, start, end, state);
        }
#endif
        return false;
    }

#if defined(MAGICDEC_AVX512)
    template <int HeadSize>
    bool run_few(const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t end, const State &state) {
        const auto run = [&]<int... Rows>(std::integer_sequence<int, Rows...>) {
            return ((item.rows == Rows + 1 && (run_few_rows<HeadSize, Rows + 1>(sequence, item, start, end, state), true)) || ...);
        };
        return run(std::make_integer_sequence<int, kFewRows>());
    }

    template <int HeadSize, int Rows>
    void run_few_rows(const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t end, const State &state) {
        using Few = FewRows<HeadSize>;
        const int64_t count = end - start, padded = round_up(count, Few::kKeys);
        groups_.find(sequence, args_, start, count, padded);
        const Element *values = head(args_.values, item), *next_keys = find_next_keys(next_groups_, sequence, item, end, Few::kKeys).cache;
        const int64_t *last_groups = groups_.offsets + (padded - Few::kKeys) / EntryGroups::kEntries;
        const Few few = { // where nothing comes, ask for what is here already
            head(args_.keys, item), values, next_keys ? next_keys : values,
            groups_.offsets, next_keys ? next_groups_.offsets : last_groups, count, padded
        };
        few.template score<Rows>(query_, tile_, scores_);

        // A tile's softmax: step 0 finds the maxima, each of the others makes some of the weights.
        constexpr int64_t kSteps = 1 + kTile / kWeights;
        static_assert(kSteps <= Few::kAsides);
        const auto soften = [&](int64_t tile, int64_t step) {
            const int64_t at = tile * kTile, size = std::min(kTile, padded - at), i = (step - 1) * kWeights;
            float *scores = scores_ + tile * (Rows * kTile), *keep = factors_ + tile % 2 * kLanes;
            if (step == 0) {
                mask(sequence, item, start + at, size, 0, scores);
                UNROLL for (int r = 0; r < Rows; ++r) keep[r] = find_maximum(r, size, scores + r * kTile, state);
                store(keep, exp(load(keep)));
                UNROLL for (int r = 0; r < Rows; ++r)
                    store(denominators_ + r * kLanes, load(denominators_ + r * kLanes) * all(keep[r]));
            } else if (i < size) {
                UNROLL for (int r = 0; r < Rows; ++r) {
                    float *denominator = denominators_ + r * kLanes;
                    store(denominator, next_weights(scores + r * kTile, i, all(state.maxima[r]), load(denominator)));
                }
            }
        };
        for (int64_t step = 0; step < kSteps; ++step) soften(0, step);
        for (int64_t tile = 0; tile * kTile < padded; ++tile) {
            const bool more = (tile + 1) * kTile < padded;
            const float *weights = scores_ + tile * (Rows * kTile), *keep = factors_ + tile % 2 * kLanes;
            few.template weigh<Rows>(tile, weights, keep, state.sums, [&](int64_t part) {
                if (more && part < kSteps) soften(tile + 1, part);
            });
        }
    }
#endif

    // Softmax of a tile: scores [rows, kTile] to weights, as operands from each row's beginning on, and factors_.
    void scores_to_weights(
        const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t count, int64_t skipped, float *scores,
        const State &state
    ) {
        mask(sequence, item, start, count, skipped, scores);
        const int64_t share = ahead_.left() / (2 * (item.rows - skipped)) + 1;
        for (int64_t r = skipped; r < item.rows; ++r) factors_[r] = find_maximum(r, count, scores + r * kTile, state), ahead_.issue(share);
        for (int64_t r = skipped; r < item.rows; r += kLanes) store(factors_ + r, exp(load(factors_ + r)));
        for (int64_t r = skipped; r < item.rows; ++r) exponentiate(r, count, scores + r * kTile, state), ahead_.issue(share);
    }

    // Ask for the keys of the tile that comes after this one: of this item, or of the next.
    void plan_next_keys(const AttentionSequence &sequence, const AttentionItem &item, int64_t start) {
        const auto [keys, count] = find_next_keys(next_rows_, sequence, item, start, kTile);
        keys ? ahead_.plan(keys, next_rows_, count, args_.head_size) : ahead_.clear();
    }

    struct NextKeys {
        const Element *cache;
        int64_t count;
    };

    // Up to `most` keys that will be read after those before `start`, of this item or of the next, and in `rows` where they
    // stand, filled up to `most`. Null where nothing comes.
    template <class Rows>
    NextKeys find_next_keys(Rows &rows, const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t most) {
        const bool here = start < std::min(split_start(item.last_split), length(sequence, item));
        const AttentionItem *following = here ? &item : untaken();
        if (following == nullptr) return {nullptr, 0};
        const AttentionItem &next = *following;
        const AttentionSequence &its = args_.sequences[next.sequence];
        const int64_t first = here ? start : split_start(next.first_split);
        const int64_t count = std::min(most, length(its, next) - first);
        rows.find(its, args_, first, count, most);
        return {head(args_.keys, next), count};
    }

    // The item that this thread is likely to take next, or null. To be asked as late as can be: the others take items too.
    const AttentionItem *untaken() const {
        const int64_t index = next_.load(std::memory_order_relaxed);
        return index < static_cast<int64_t>(plan_.items.size()) ? &plan_.items[index] : nullptr;
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
    void mask(
        const AttentionSequence &sequence, const AttentionItem &item, int64_t start, int64_t count, int64_t skipped, float *tile
    ) {
        const int64_t end = sequence.cache_len + sequence.num_rows;
        if (start + count <= sequence.cache_len + item.first / group_ + 1 && !(sequence.tree && start + count > sequence.cache_len))
            return;
        for (int64_t r = skipped; r < item.rows; ++r) {
            const int64_t row = (item.first + r) / group_;
            float *scores = tile + r * kTile - start;
            if (sequence.tree) {
                const uint8_t *seen = sequence.tree + row * sequence.num_rows - sequence.cache_len;
                for (int64_t p = std::max(start, sequence.cache_len); p < std::min(start + count, end); ++p)
                    if (!seen[p]) scores[p] = -INFINITY;
            }
            const int64_t visible = sequence.tree ? end : sequence.cache_len + row + 1;
            for (int64_t p = std::max(start, visible); p < start + count; ++p) scores[p] = -INFINITY;
        }
    }

    // Finds the new maximum. Returns the exponent of what the old one's sums are worth.
    float find_maximum(int64_t r, int64_t count, const float *scores, const State &state) {
        Floats top = load(scores);
        for (int64_t i = kLanes; i < count; i += kLanes) top = max(top, load(scores + i));
        const float old = state.maxima[r];
        state.maxima[r] = std::max(old, greatest(top));
        return old - state.maxima[r];
    }

    // Scores to weights, as operands from the row's beginning on.
    void exponentiate(int64_t r, int64_t count, float *scores, const State &state) {
        float *denominator = denominators_ + r * kLanes;
        const Floats maximum = all(state.maxima[r]);
        Floats total = load(denominator) * all(factors_[r]);
        for (int64_t i = 0; i < count; i += kWeights) total = next_weights(scores, i, maximum, total);
        store(denominator, total);
    }

    static constexpr int64_t kWeights = Operand::kNumbers * kLanes; // of one operand

    // Those from `i` on; their sum, added to `total`.
    static Floats next_weights(float *scores, int64_t i, Floats maximum, Floats total) {
        Floats weights[Operand::kNumbers];
        UNROLL for (int part = 0; part < Operand::kNumbers; ++part) {
            weights[part] = Operand::exp(load(scores + i + part * kLanes) - maximum);
            total += weights[part];
        }
        store(scores + i / Operand::kNumbers, pack_weights(weights));
        return total;
    }

    static Floats pack_weights(const Floats (&weights)[1]) { return weights[0]; }
#if defined(MAGICDEC_AVX512)
    static Floats pack_weights(const Floats (&weights)[2]) { return (Floats)_mm512_cvtne2ps_pbh(weights[1], weights[0]); }
#endif

    const AttentionArgs &args_;
    const AttentionPlan &plan_;
    const std::atomic<int64_t> &next_;
    const int64_t group_, width_;
    const bool full_ = args_.head_size == width_;
    TileRows rows_, next_rows_;
#if defined(MAGICDEC_AVX512)
    EntryGroups groups_, next_groups_;
#endif
    Prefetch ahead_;
    float *query_, *tile_, *scores_, *denominators_, *factors_, *state_, *split_;
};

template <class Query, class Cache, class Operand>
int64_t work(const AttentionArgs &args, AttentionPlan &plan, const Team &team, std::atomic<int64_t> &next) {
    Worker<Query, Cache, Operand> worker(args, plan, next, plan.thread_memory + team.index * plan.thread_size);
    const int64_t count = static_cast<int64_t>(plan.items.size());
    int64_t index, done = 0;
    for (; (index = next.fetch_add(1, std::memory_order_relaxed)) < count; ++done) {
        const AttentionItem &item = plan.items[index];
        worker.run(item);
        if (item.merge < 0) continue;
        std::atomic<int64_t> &remaining = plan.remaining[item.merge];
        if (remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        remaining.store(plan.merges[item.merge].num_items, std::memory_order_relaxed); // for the next layer
        worker.finish(item);
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
