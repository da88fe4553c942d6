#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace magicdec {
namespace {

// The buffers of a pass: grown, never shrunk.
struct Workspace {
    Scratch hidden, input, qkv, query, mixed, inner, threads;
    AttentionPlan plan;
};

// Adds up the time of the parts, on thread 0 and if it is wanted.
class Clock {
  public:
    Clock(const Team &team, double *seconds) : seconds_(team.index == 0 ? seconds : nullptr) {
        if (seconds_) last_ = std::chrono::steady_clock::now();
    }

    void end(Part part) {
        if (!seconds_) return;
        const auto now = std::chrono::steady_clock::now();
        seconds_[part] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

  private:
    double *const seconds_;
    std::chrono::steady_clock::time_point last_;
};

class Step {
  public:
    Step(const Decoder &decoder, const Pass &pass, Workspace &space, int num_threads)
        : decoder_(decoder), pass_(pass), kernels_(kernels()), plan_(space.plan), stride_(round_up(decoder.hidden_size, kAlign)),
          heads_(decoder.num_heads + 2 * decoder.num_kv_heads), thread_size_(round_up(linear_thread_size(most_inputs()), kAlign)) {
        const int64_t rows = pass.rows, attended = decoder.num_heads * decoder.head_size;
        hidden_ = space.hidden.reserve(rows * stride_);
        qkv_ = space.qkv.reserve(rows * heads_ * decoder.head_size);
        input_ = space.input.reserve(std::max(rows, pass.num_wanted) * std::max(decoder.hidden_size, attended));
        query_ = space.query.reserve(rows * attended);
        mixed_ = space.mixed.reserve(rows * attended);
        inner_ = space.inner.reserve(rows * decoder.inner_size);
        memory_ = space.threads.reserve(thread_size_ * num_threads);
        plan_.prepare(attention(0), num_threads);
    }

    void run(const Team &team) {
        Clock clock(team, pass_.seconds);
        each_row(team, pass_.rows, [&](int64_t row) { kernels_.embed(decoder_, pass_.token_ids[row], hidden_ + row * stride_); });
        for (int64_t index = 0; index < decoder_.num_layers; ++index) {
            const DecoderLayer &layer = decoder_.layers[index];
            normalise(team, layer.input_norm, layer.input_offset, input_of(layer.qkv, input_, decoder_.hidden_size));
            clock.end(kNorms);
            multiply(team, layer.qkv, input_, pass_.rows, {kStore, floats(qkv_, heads_ * decoder_.head_size), heads_ * decoder_.head_size});
            clock.end(kQkv);
            write_heads(team, index);
            clock.end(kHeads);
            kernels_.attention(attention(index), plan_, team);
            team.barrier();
            clock.end(kAttention);
            multiply(team, layer.dense, mixed(team, layer.dense), pass_.rows, {kAdd, floats(hidden_, stride_), decoder_.hidden_size});
            clock.end(kDense);
            normalise(team, layer.post_norm, layer.post_offset, input_of(layer.gate_up, input_, decoder_.hidden_size));
            clock.end(kNorms);
            const Rows inner = input_of(layer.down, inner_, decoder_.inner_size);
            multiply(team, layer.gate_up, input_, pass_.rows, {kGate, inner, decoder_.inner_size});
            clock.end(kGateUp);
            multiply(team, layer.down, inner_, pass_.rows, {kAdd, floats(hidden_, stride_), decoder_.hidden_size});
            clock.end(kDown);
        }
        if (pass_.num_wanted > 0) make_logits(team);
        clock.end(kLogits);
    }

  private:
    int64_t most_inputs() const {
        return std::max({decoder_.hidden_size, decoder_.inner_size, decoder_.num_heads * decoder_.head_size});
    }

    static Rows floats(float *data, int64_t stride) { return {data, stride, kFloat32, 0}; }

    // What a matrix takes: the model's type, or bfloat16 that hold E4M3 numbers.
    Rows input_of(const Matrix &matrix, float *data, int64_t size) const {
        return {data, size, matrix.fp8_factor != 0 ? kBFloat16 : decoder_.dtype, matrix.fp8_factor};
    }

    template <class Work> static void each_row(const Team &team, int64_t rows, Work &&work) {
        const Share share = share_of(rows, 1, team);
        for (int64_t row = share.first; row < share.last; ++row) work(row);
    }

    void normalise(const Team &team, const float *weight, const float *offset, const Rows &to) {
        each_row(team, pass_.rows, [&](int64_t row) {
            kernels_.norm(hidden_ + row * stride_, weight, offset, decoder_.hidden_size, decoder_.epsilon, to, row);
        });
        team.barrier();
    }

    void multiply(const Team &team, const Matrix &matrix, float *from, int64_t rows, const Product &product) {
        const Share panels = share_of(matrix.num_panels, 1, team);
        kernels_.linear(matrix, input_of(matrix, from, matrix.inputs), rows, panels, product, memory_ + team.index * thread_size_);
        team.barrier();
    }

    // Queries to query_, keys and values to the cache.
    void write_heads(const Team &team, int64_t index) {
        const DecoderLayer &layer = decoder_.layers[index];
        const int64_t size = decoder_.head_size, width = size_of(pass_.cache_type);
        const bool fp8 = pass_.cache_type == kFloat8;
        const Share share = share_of(pass_.rows * heads_, 1, team);
        for (int64_t item = share.first; item < share.last; ++item) {
            const int64_t row = item / heads_, number = item % heads_, position = pass_.positions[row];
            Head head = {qkv_ + item * size, nullptr, nullptr, nullptr, nullptr, fp8 ? 1.0f / layer.kv_scale : 1.0f, nullptr, pass_.cache_type};
            const bool query = number < decoder_.num_heads, value = number >= heads_ - decoder_.num_kv_heads;
            if (!value) {
                head.norm = query ? layer.query_norm : layer.key_norm;
                head.cos = decoder_.cosines + position * (size / 2), head.sin = decoder_.sines + position * (size / 2);
                head.turn = query ? decoder_.query_turn : decoder_.key_turn;
            }
            if (query) {
                head.factor = scale() * (fp8 ? layer.kv_scale : 1.0f);
                head.type = decoder_.dtype;
                head.to = reinterpret_cast<char *>(query_) + (row * decoder_.num_heads + number) * size * size_of(decoder_.dtype);
            } else {
                const int64_t kv_head = number - decoder_.num_heads - (value ? decoder_.num_kv_heads : 0);
                const int64_t slot = (index * decoder_.num_kv_heads + kv_head) * pass_.num_slots + pass_.slots[row];
                head.to = static_cast<char *>(value ? pass_.values : pass_.keys) + slot * size * width;
            }
            kernels_.write_head(head, size, decoder_.epsilon);
        }
        team.barrier();
    }

    float scale() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(decoder_.head_size))); }

    AttentionArgs attention(int64_t index) const {
        const int64_t stride = decoder_.num_heads * decoder_.head_size, head_stride = pass_.num_slots * decoder_.head_size;
        const int64_t layer = index * decoder_.num_kv_heads * head_stride * size_of(pass_.cache_type);
        return {
            query_, mixed_, static_cast<const char *>(pass_.keys) + layer, static_cast<const char *>(pass_.values) + layer,
            pass_.sequences, pass_.num_sequences, decoder_.num_heads, decoder_.num_kv_heads, decoder_.head_size, pass_.block_size,
            stride, stride, head_stride, decoder_.dtype, pass_.cache_type,
            pass_.cache_type == kFloat8 ? decoder_.layers[index].kv_scale : 1.0f,
        };
    }

    // Attention's result as `dense` takes it.
    float *mixed(const Team &team, const Matrix &dense) {
        if (dense.fp8_factor == 0) return mixed_;
        const Rows from = {mixed_, dense.inputs, decoder_.dtype, 0}, to = input_of(dense, input_, dense.inputs);
        each_row(team, pass_.rows, [&](int64_t row) { kernels_.convert(from, row, dense.inputs, to); });
        team.barrier();
        return input_;
    }

    void make_logits(const Team &team) {
        const Rows to = input_of(decoder_.head, input_, decoder_.hidden_size);
        each_row(team, pass_.num_wanted, [&](int64_t i) {
            const float *row = hidden_ + pass_.wanted[i] * stride_;
            kernels_.norm(row, decoder_.final_norm, nullptr, decoder_.hidden_size, decoder_.epsilon, to, i);
        });
        team.barrier();
        multiply(team, decoder_.head, input_, pass_.num_wanted, {kStore, floats(pass_.logits, pass_.logits_stride), pass_.logits_stride});
    }

    const Decoder &decoder_;
    const Pass &pass_;
    const Kernels &kernels_;
    AttentionPlan &plan_;
    const int64_t stride_, heads_, thread_size_;
    float *hidden_, *input_, *qkv_, *query_, *mixed_, *inner_, *memory_;
};

// Whether each of the values lies in 0 .. size - 1.
bool within(const int64_t *values, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= size) return false;
    return true;
}

bool valid(const Decoder &decoder, const Pass &pass) {
    for (int64_t i = 0; i < pass.num_sequences; ++i) {
        const AttentionSequence &sequence = pass.sequences[i];
        const int64_t blocks = (sequence.cache_len + sequence.num_rows + pass.block_size - 1) / pass.block_size;
        for (int64_t block = 0; block < blocks; ++block)
            if (sequence.blocks[block] < 0 || (sequence.blocks[block] + 1) * pass.block_size > pass.num_slots) return false;
    }
    return within(pass.token_ids, pass.rows, decoder.vocab_size) && within(pass.positions, pass.rows, decoder.num_positions) &&
           within(pass.slots, pass.rows, pass.num_slots) && within(pass.wanted, pass.num_wanted, pass.rows);
}

} // namespace
} // namespace magicdec

using namespace magicdec;

// 0 = done; 1 = a token, position, slot, block or row that does not exist, 2 = this pair of number types is not supported.
extern "C" __attribute__((visibility("default"))) int magicdec_step(const Decoder *decoder, const Pass *pass) {
    if (!attention_supports(decoder->dtype, pass->cache_type)) return 2;
    if (!valid(*decoder, *pass)) return 1;
    static thread_local Workspace space;
    Step step(*decoder, *pass, space, num_threads());
    run_parallel([&](const Team &team) { step.run(team); });
    return 0;
}
