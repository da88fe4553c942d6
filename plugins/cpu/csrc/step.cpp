#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "phases.h"
#include "pool.h"

namespace magicdec {
namespace {

// The buffers of a pass: grown, never shrunk.
struct Workspace {
    Scratch hidden, input, qkv, query, mixed, inner, threads;
    AttentionPlan plan;
    Phases phases;
    std::unique_ptr<std::atomic<int64_t>[]> attended; // by layer: attention items begun
    int64_t num_attended = 0;
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
        : decoder_(decoder), pass_(pass), kernels_(kernels()), plan_(space.plan), phases_(space.phases), stride_(round_up(decoder.hidden_size, kAlign)),
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
        phases_.reset(decoder.num_layers * kPhasesOfLayer + 3, num_threads);
        if (decoder.num_layers > space.num_attended) {
            space.num_attended = decoder.num_layers;
            space.attended = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(decoder.num_layers));
        }
        attended_ = space.attended.get();
        for (int64_t layer = 0; layer < decoder.num_layers; ++layer) attended_[layer] = 0;
    }

    // One thread's part.
    void run(const Team &team) {
        Thread thread{team, memory_ + team.index * thread_size_, 0};
        Clock clock(team, pass_.seconds);
        each_row(thread, pass_.rows, [&](int64_t row) { kernels_.embed(decoder_, pass_.token_ids[row], hidden_ + row * stride_); });
        for (int64_t index = 0; index < decoder_.num_layers; ++index) {
            const DecoderLayer &layer = decoder_.layers[index];
            normalise(thread, layer.input_norm, layer.input_offset, input_of(layer.qkv, input_, decoder_.hidden_size));
            clock.end(kNorms);
            const int64_t projected = heads_ * decoder_.head_size;
            multiply(thread, layer.qkv, input_, pass_.rows, {kStore, floats(qkv_, projected), projected});
            clock.end(kQkv);
            write_heads(thread, index);
            clock.end(kHeads);
            attend(thread, index);
            clock.end(kAttention);
            multiply(thread, layer.dense, mixed(thread, layer.dense), pass_.rows, {kAdd, floats(hidden_, stride_), decoder_.hidden_size});
            clock.end(kDense);
            normalise(thread, layer.post_norm, layer.post_offset, input_of(layer.gate_up, input_, decoder_.hidden_size));
            clock.end(kNorms);
            const Rows inner = input_of(layer.down, inner_, decoder_.inner_size);
            multiply(thread, layer.gate_up, input_, pass_.rows, {kGate, inner, decoder_.inner_size});
            clock.end(kGateUp);
            multiply(thread, layer.down, inner_, pass_.rows, {kAdd, floats(hidden_, stride_), decoder_.hidden_size});
            clock.end(kDown);
        }
        if (pass_.num_wanted > 0) make_logits(thread);
        clock.end(kLogits);
    }

  private:
    struct Thread {
        const Team &team;
        float *memory;
        int64_t phase; // the next one
    };

    static constexpr int64_t kPhasesOfLayer = 9;
    static constexpr int64_t kPieces = 4; // of a thread, in a phase

    int64_t most_inputs() const {
        return std::max({decoder_.hidden_size, decoder_.inner_size, decoder_.num_heads * decoder_.head_size});
    }

    static Rows floats(float *data, int64_t stride) { return {data, stride, kFloat32, 0}; }

    // What a matrix takes: the model's type, or bfloat16 that hold E4M3 numbers.
    Rows input_of(const Matrix &matrix, float *data, int64_t size) const {
        return {data, size, matrix.fp8_factor != 0 ? kBFloat16 : decoder_.dtype, matrix.fp8_factor};
    }

    // work(i) for 0 .. count - 1, in some pieces for each thread.
    template <class Work> void each(Thread &thread, int64_t count, int64_t per_thread, Work &&work) {
        const int64_t pieces = std::min<int64_t>(count, per_thread * thread.team.count);
        phases_.run(thread.team, thread.phase++, pieces, [&](int64_t piece) {
            work(Share{count * piece / pieces, count * (piece + 1) / pieces});
        });
    }

    template <class Work> void each_row(Thread &thread, int64_t rows, Work &&work) {
        each(thread, rows, kPieces, [&](const Share &share) {
            for (int64_t row = share.first; row < share.last; ++row) work(row);
        });
    }

    void normalise(Thread &thread, const float *weight, const float *offset, const Rows &to) {
        each_row(thread, pass_.rows, [&](int64_t row) {
            kernels_.norm(hidden_ + row * stride_, weight, offset, decoder_.hidden_size, decoder_.epsilon, to, row);
        });
    }

    void multiply(Thread &thread, const Matrix &matrix, float *from, int64_t rows, const Product &product) {
        const bool few = rows <= kRowsAtOnce;
        const Rows x = input_of(matrix, from, matrix.inputs);
        bool again = false;
        each(thread, matrix.num_panels, few ? kPieces : 1, [&](const Share &panels) {
            kernels_.linear(matrix, x, rows, panels, product, thread.memory, again);
            again = few;
        });
    }

    void attend(Thread &thread, int64_t index) {
        const AttentionArgs args = attention(index);
        const auto items = static_cast<int64_t>(plan_.items.size());
        phases_.take(thread.team, thread.phase++, items, attended_[index], [&](std::atomic<int64_t> &next) {
            return kernels_.attention(args, plan_, thread.team, next);
        });
    }

    void write_heads(Thread &thread, int64_t index) {
        each_row(thread, pass_.rows * heads_, [&](int64_t item) { write_head(index, item / heads_, item % heads_); });
    }

    // A query to query_, a key or a value to the cache.
    void write_head(int64_t index, int64_t row, int64_t number) {
        const DecoderLayer &layer = decoder_.layers[index];
        const int64_t size = decoder_.head_size, position = pass_.positions[row];
        const bool query = number < decoder_.num_heads, value = number >= heads_ - decoder_.num_kv_heads;
        const float kv_scale = pass_.cache_type == kFloat8 ? layer.kv_scale : 1.0f;
        Head head = {qkv_ + (row * heads_ + number) * size, nullptr, nullptr, nullptr, nullptr, 1.0f / kv_scale, nullptr, pass_.cache_type};
        if (!value) {
            head.norm = query ? layer.query_norm : layer.key_norm;
            head.cos = decoder_.cosines + position * (size / 2), head.sin = decoder_.sines + position * (size / 2);
            head.turn = query ? decoder_.query_turn : decoder_.key_turn;
        }
        if (query) {
            head.factor = scale() * kv_scale;
            head.type = decoder_.dtype;
            head.to = reinterpret_cast<char *>(query_) + (row * decoder_.num_heads + number) * size * size_of(decoder_.dtype);
        } else {
            const int64_t kv_head = number - decoder_.num_heads - (value ? decoder_.num_kv_heads : 0);
            const int64_t slot = (index * decoder_.num_kv_heads + kv_head) * pass_.num_slots + pass_.slots[row];
            head.to = static_cast<char *>(value ? pass_.values : pass_.keys) + slot * size * size_of(pass_.cache_type);
        }
        kernels_.write_head(head, size, decoder_.epsilon);
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
    float *mixed(Thread &thread, const Matrix &dense) {
        if (dense.fp8_factor == 0) return mixed_;
        const Rows from = {mixed_, dense.inputs, decoder_.dtype, 0}, to = input_of(dense, input_, dense.inputs);
        each_row(thread, pass_.rows, [&](int64_t row) { kernels_.convert(from, row, dense.inputs, to); });
        return input_;
    }

    void make_logits(Thread &thread) {
        const Rows to = input_of(decoder_.head, input_, decoder_.hidden_size);
        each_row(thread, pass_.num_wanted, [&](int64_t i) {
            const float *row = hidden_ + pass_.wanted[i] * stride_;
            kernels_.norm(row, decoder_.final_norm, nullptr, decoder_.hidden_size, decoder_.epsilon, to, i);
        });
        multiply(thread, decoder_.head, input_, pass_.num_wanted, {kStore, floats(pass_.logits, pass_.logits_stride), pass_.logits_stride});
    }

    const Decoder &decoder_;
    const Pass &pass_;
    const Kernels &kernels_;
    AttentionPlan &plan_;
    Phases &phases_;
    std::atomic<int64_t> *attended_;
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
