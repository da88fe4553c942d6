#include "attention.h"

#include <algorithm>

#include "kernels.h"

namespace magicdec {

void AttentionPlan::prepare(const AttentionArgs &args, int num_threads) {
    items.clear(), merges.clear();
    const int64_t group = args.num_heads / args.num_kv_heads;
    // With work enough for all threads a split need not be an item of its own.
    const bool whole = args.num_sequences * args.num_kv_heads >= 6 * num_threads;
    for (int32_t sequence = 0; sequence < args.num_sequences; ++sequence) {
        const AttentionSequence &here = args.sequences[sequence];
        if (here.num_rows > 0) add(args, sequence, whole || here.num_rows * group > kGroupRows);
    }
    int64_t needed = 0;
    for (const AttentionItem &item : items)
        if (item.merge >= 0) needed += round_up(partial_size(item.rows, args.head_size), 16);
    float *memory = partial_memory_.reserve(needed);
    partials.clear();
    for (AttentionItem &item : items)
        if (item.merge >= 0) {
            item.partial = memory;
            memory += round_up(partial_size(item.rows, args.head_size), 16);
            partials.push_back(item.partial);
        }
    if (static_cast<int64_t>(merges.size()) > merges_size_) {
        merges_size_ = static_cast<int64_t>(merges.size());
        remaining = std::make_unique<std::atomic<int64_t>[]>(merges.size());
    }
    for (size_t index = 0; index < merges.size(); ++index) remaining[index] = merges[index].num_items;
    std::stable_sort(items.begin(), items.end(), [](const AttentionItem &a, const AttentionItem &b) { return a.cost > b.cost; });
    thread_size = round_up(attention_thread_size(args.head_size), 1024);
    thread_memory = thread_memory_.reserve(thread_size * num_threads);
}

// whole: each item has some of the rows and all their splits; otherwise all of the rows and one split.
void AttentionPlan::add(const AttentionArgs &args, int32_t sequence, bool whole) {
    const AttentionSequence &here = args.sequences[sequence];
    const int64_t group = args.num_heads / args.num_kv_heads, rows = here.num_rows * group;
    const int64_t length = here.cache_len + here.num_rows, splits = num_splits(length);
    constexpr int64_t kOverhead = 12; // rows whose arithmetic takes as long as reading and packing a tile
    for (int32_t head = 0; head < args.num_kv_heads; ++head) {
        if (whole || splits == 1) {
            const int64_t parts = (rows + kGroupRows - 1) / kGroupRows;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
                const int64_t seen = here.cache_len + (last - 1) / group + 1;
                items.push_back({sequence, head, first, last - first, -1, seen * (last - first + kOverhead), -1, nullptr});
            }
            continue;
        }
        const int64_t first_item = merges.empty() ? 0 : merges.back().first_item + merges.back().num_items;
        for (int64_t split = 0; split < splits; ++split) {
            const int64_t keys = std::min(split_start(split + 1), length) - split_start(split);
            const int32_t merge = static_cast<int32_t>(merges.size());
            items.push_back({sequence, head, 0, rows, split, keys * (rows + kOverhead), merge, nullptr});
        }
        merges.push_back({first_item, splits});
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
