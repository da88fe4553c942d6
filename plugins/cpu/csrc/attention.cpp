#include "attention.h"

#include <algorithm>

#include "kernels.h"

namespace magicdec {

namespace {

constexpr int64_t kOverhead = 12; // rows whose arithmetic takes as long as reading and packing a tile

int64_t length_of(const AttentionSequence &sequence) { return sequence.cache_len + sequence.num_rows; }

} // namespace

void AttentionPlan::prepare(const AttentionArgs &args, int num_threads) {
    items.clear(), merges.clear();
    const int64_t group = args.num_heads / args.num_kv_heads;
    // With work enough for all threads a sequence's splits need not be items of their own.
    const bool whole = args.num_sequences * args.num_kv_heads >= 6 * num_threads;
    int64_t splits = 0;
    for (int64_t index = 0; index < args.num_sequences; ++index)
        splits += num_splits(length_of(args.sequences[index])) * args.num_kv_heads;
    for (int32_t index = 0; index < args.num_sequences; ++index) {
        const AttentionSequence &here = args.sequences[index];
        if (here.num_rows == 0) continue;
        if (whole || here.num_rows * group > kGroupRows || num_splits(length_of(here)) == 1) add_whole(args, index);
        else add_split(args, index, splits / (2 * num_threads));
    }
    int64_t needed = 0;
    const auto size_of_merge = [&](const AttentionItem &item) { // counted once, with the first of its items
        return item.merge >= 0 && item.first_split == 0 ? merges[item.merge].num_splits * partial_size(item.rows, args.head_size) : 0;
    };
    for (const AttentionItem &item : items) needed += size_of_merge(item);
    float *memory = partial_memory_.reserve(needed);
    for (const AttentionItem &item : items)
        if (const int64_t size = size_of_merge(item)) merges[item.merge].partials = memory, memory += size;
    if (static_cast<int64_t>(merges.size()) > merges_size_) {
        merges_size_ = static_cast<int64_t>(merges.size());
        remaining = std::make_unique<std::atomic<int64_t>[]>(merges.size());
    }
    for (size_t index = 0; index < merges.size(); ++index) remaining[index] = merges[index].num_items;
    std::stable_sort(items.begin(), items.end(), [](const AttentionItem &a, const AttentionItem &b) { return a.cost > b.cost; });
    thread_size = round_up(attention_thread_size(args.head_size), 1024);
    thread_memory = thread_memory_.reserve(thread_size * num_threads);
}

// Each item has some of the rows and all their splits.
void AttentionPlan::add_whole(const AttentionArgs &args, int32_t sequence) {
    const AttentionSequence &here = args.sequences[sequence];
    const int64_t group = args.num_heads / args.num_kv_heads, rows = here.num_rows * group;
    const int64_t parts = (rows + kGroupRows - 1) / kGroupRows;
    for (int32_t head = 0; head < args.num_kv_heads; ++head)
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
            const int64_t seen = here.tree ? length_of(here) : here.cache_len + (last - 1) / group + 1;
            items.push_back({sequence, head, first, last - first, 0, num_splits(seen), seen * (last - first + kOverhead), -1});
        }
}

// Each item has all of the rows and some splits that follow each other, at most `most`: memory is read the faster the
// longer a thread stays with a KV head, and the short items, in the end the short first splits, come last, so that the
// threads end together.
void AttentionPlan::add_split(const AttentionArgs &args, int32_t sequence, int64_t most) {
    const AttentionSequence &here = args.sequences[sequence];
    const int64_t rows = here.num_rows * (args.num_heads / args.num_kv_heads);
    const int64_t length = length_of(here), splits = num_splits(length);
    for (int32_t head = 0; head < args.num_kv_heads; ++head) {
        const int32_t merge = static_cast<int32_t>(merges.size());
        int64_t count = 0;
        for (int64_t last = splits, first; last > 0; last = first, ++count) {
            first = last - std::clamp<int64_t>(last / 2, 1, std::max<int64_t>(most, 1));
            const int64_t keys = std::min(split_start(last), length) - split_start(first);
            items.push_back({sequence, head, 0, rows, first, last, keys * (rows + kOverhead), merge});
        }
        merges.push_back({nullptr, splits, count});
    }
}

} // namespace magicdec

using namespace magicdec;

// 0 = done, 1 = this pair of number types is not supported. All threads; the caller's tensors must stay as they are.
extern "C" __attribute__((visibility("default"))) int magicdec_attention(const AttentionArgs *args) {
    if (!attention_supports(args->query_type, args->cache_type)) return 1;
    static thread_local AttentionPlan plans; // one for each caller
    AttentionPlan &plan = plans;             // this caller's, in the pool's threads too
    plan.prepare(*args, num_threads());
    std::atomic<int64_t> next{0};
    run_parallel([&](const Team &team) { kernels().attention(*args, plan, team, next); });
    return 0;
}
