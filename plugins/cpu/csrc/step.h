// A decoder's forward pass over a paged cache: one call, one parallel region. step.cpp says in which order.
//
// The residual stream, the products and everything between them are float32; what enters a matrix product or attention
// and what is cached is rounded once, to the model's type.
#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace magicdec {

// plugins/model/native_model.py declares these structures once more. Norms are padded with zeros to kAlign.
struct DecoderLayer {
    const float *input_norm, *input_offset; // offset: null, or subtracted from what the norm makes
    const float *post_norm, *post_offset;
    const float *query_norm, *key_norm; // of each head, or null
    Matrix qkv, dense, gate_up, down;
    float kv_scale; // of an FP8 cache's numbers
};

struct Decoder {
    const DecoderLayer *layers;
    const float *final_norm;
    const void *embedding;         // [vocab_size, hidden_size]
    const float *embedding_scales; // of an int8 table, by row; null of one in `dtype`
    const float *cosines, *sines;  // [positions, head_size / 2]
    const float *key_turn, *query_turn; // null, or [head_size, head_size]: heads are multiplied with it, for an FP8 cache
    Matrix head;
    int64_t num_layers, hidden_size, inner_size, num_heads, num_kv_heads, head_size, vocab_size, num_positions;
    float epsilon;
    DType dtype;
};

struct Pass {
    const int64_t *token_ids, *positions, *slots; // [rows]
    const int64_t *wanted;                        // [num_wanted] rows
    const AttentionSequence *sequences;
    void *keys, *values; // [num_layers, num_kv_heads, num_slots, head_size]
    float *logits;       // [num_wanted, head outputs]
    double *seconds;     // null, or [kNumParts]: the time that each part took is added
    int64_t rows, num_wanted, num_sequences, block_size, num_slots, logits_stride;
    DType cache_type;
};

constexpr int64_t kAlign = 16;

// Of a pass's time; plugins/model/native_model.py has the same order.
enum Part { kNorms, kQkv, kHeads, kAttention, kDense, kGateUp, kDown, kLogits, kNumParts };

// One head of one row: where it comes from and what is made of it.
struct Head {
    const float *from;         // [head_size]
    const float *norm;         // null, or of the head
    const float *cos, *sin;    // null, or [head_size / 2]
    const float *turn;         // null, or [head_size, head_size]
    float factor;
    void *to;
    DType type;
};

} // namespace magicdec
