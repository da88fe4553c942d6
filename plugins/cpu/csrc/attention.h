// Paged attention of one layer. The kernel: attention_kernels.cpp. What is computed by whom: AttentionPlan.
//
// Row by row the same bits: keys are walked in tiles of kTile and splits of split_start(), both by position in the
// sequence; a split's softmax starts anew, and splits are merged in order. Neither the other rows of a pass nor the
// threads have any part in that.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "numbers.h"
#include "pool.h"

namespace magicdec {

// plugins/cpu/attention.py declares both structures once more.
struct AttentionSequence {
    int64_t first_row, num_rows; // of the query
    int64_t cache_len;           // entries before the new rows; row i sees entries 0 .. cache_len + i
    const int32_t *blocks;       // the block table; entry p stands in slot blocks[p / block_size] * block_size + p % block_size
    const uint8_t *tree;         // null, or [num_rows, num_rows]: row i sees new entry j where not 0, instead of j <= i
};

struct AttentionArgs {
    const void *query; // [T, num_heads, head_size], scaled already
    void *out;         // the same shape and type
    const void *keys, *values; // [num_kv_heads, slots, head_size]
    const AttentionSequence *sequences;
    int64_t num_sequences, num_heads, num_kv_heads, head_size, block_size;
    int64_t query_stride, out_stride; // elements from row to row
    int64_t head_stride;              // elements of the cache from KV head to KV head
    DType query_type, cache_type;     // see attention_supports
    float value_scale;                // the result is multiplied with it
};

// Queries of float32, bfloat16, float16 over a cache of the same type or of float8.
static inline bool attention_supports(DType query_type, DType cache_type) {
    return query_type != kFloat8 && (cache_type == query_type || cache_type == kFloat8);
}

constexpr int64_t kTile = 128;     // keys
constexpr int64_t kMaxHeadSize = 1024;
constexpr int64_t kGroupRows = 96; // rows (query rows x heads of a KV head) that share a tile's loads

constexpr int64_t kMaxSplit = 1024; // keys
// Where split i begins: short ones first, so that a short sequence has work for several threads too.
static inline int64_t split_start(int64_t i) { return i == 0 ? 0 : i < 3 ? 128 << i : kMaxSplit * (i - 2); }
static inline int64_t num_splits(int64_t length) {
    int64_t count = 0;
    while (split_start(count) < length) ++count;
    return count;
}

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
// Elements of a row of the kernel's own arrays.
static inline int64_t padded(int64_t head_size) { return round_up(head_size, 32); }

// Floats on a cache line of their own; grows, and keeps nothing when it does.
class Scratch {
  public:
    float *reserve(int64_t count) {
        if (count > size_) {
            memory_.reset(static_cast<float *>(std::aligned_alloc(64, static_cast<size_t>(round_up(count * 4, 64)))));
            size_ = count;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(float *memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t size_ = 0;
};

// Rows first .. first + rows of a (sequence, KV head), row = query row * group + head in the group.
struct AttentionItem {
    int32_t sequence, kv_head;
    int64_t first, rows;
    int64_t first_split, last_split; // one after the other, the last one excluded
    int64_t cost;
    int32_t merge; // index of the merge that it belongs to; -1: these are all splits, and the item merges them
};

// The splits of all rows of a (sequence, KV head), merged by the thread that finishes the last of its items.
struct AttentionMerge {
    float *partials; // the splits' results in order of position: see partial_size
    int64_t num_splits, num_items;
};

// Sums [rows, padded], maxima [rows] and denominators [rows], rounded up to whole cache lines.
static inline int64_t partial_size(int64_t rows, int64_t head_size) { return round_up(rows * (padded(head_size) + 2), 16); }

// Who computes what, and the memory for it. Made once for a step: it does not depend on the layer.
class AttentionPlan {
  public:
    // Only the sequences and sizes of args are read, no tensor. Not while a thread works with the plan.
    void prepare(const AttentionArgs &args, int num_threads);

    std::vector<AttentionItem> items; // in the order in which threads take them
    std::vector<AttentionMerge> merges;
    std::unique_ptr<std::atomic<int64_t>[]> remaining; // for each merge: items to come
    float *thread_memory; // of the first thread
    int64_t thread_size;  // from thread to thread

  private:
    void add_whole(const AttentionArgs &args, int32_t sequence);
    void add_split(const AttentionArgs &args, int32_t sequence, int64_t most);

    Scratch thread_memory_, partial_memory_;
    int64_t merges_size_ = 0;
};

// Floats that a thread of the kernel needs.
static inline int64_t attention_thread_size(int64_t head_size) {
    const int64_t width = padded(head_size);
    return kGroupRows * (3 * width + kTile + 16 + 8) + kTile * width;
}

} // namespace magicdec
