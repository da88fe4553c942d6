// What stands between the matrix products of a decoder layer, row by row.
#include <cmath>

#include "isa.h"
#include "kernels.h"
#include "rows.h"
#include "simd.h"
#include "step.h"

namespace magicdec::ISA {
namespace {

// 1 / root mean square of x, padded with zeros to kAlign.
float inverse_rms(const float *x, int64_t size, float epsilon) {
    Floats parts = {};
    for (int64_t i = 0; i < size; i += kLanes) parts = fma(load(x + i), load(x + i), parts);
    return 1.0f / std::sqrt(sum(parts) / static_cast<float>(size) + epsilon);
}

void write_float8(uint8_t *to, const float *x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] = to_float8(x[i]);
}

} // namespace

// A token's row of the embedding, to [hidden_size] padded with zeros.
void embed(const Decoder &decoder, int64_t token, float *to) {
    const int64_t size = decoder.hidden_size, first = token * size;
    for (int64_t i = size; i < round_up(size, kAlign); ++i) to[i] = 0;
    if (decoder.embedding_scales) {
        const auto *from = static_cast<const int8_t *>(decoder.embedding) + first;
        for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(from[i]) * decoder.embedding_scales[token];
    } else if (decoder.dtype == kFloat32) {
        std::memcpy(to, static_cast<const float *>(decoder.embedding) + first, static_cast<size_t>(size) * 4);
    } else {
        const auto *from = static_cast<const uint16_t *>(decoder.embedding) + first;
        for (int64_t i = 0; i < size; ++i)
            to[i] = decoder.dtype == kBFloat16 ? from_bfloat16(from[i]) : from_float16(from[i]);
    }
}

// Root mean square norm of x [size] less an offset, to a row; x, weight and offset are padded with zeros.
void norm(const float *x, const float *weight, const float *offset, int64_t size, float epsilon, const Rows &to, int64_t row) {
    const Floats factor = all(inverse_rms(x, size, epsilon));
    for (int64_t i = 0; i < size; i += kLanes) {
        Floats y = load(x + i) * factor * load(weight + i);
        if (offset) y -= load(offset + i);
        float part[kLanes];
        store(part, y);
        write_numbers(to, row, i, part, size - i < kLanes ? size - i : kLanes);
    }
}

// A query, key or value head: norm, rotation, turn, factor, and its place in the query or in the cache.
void write_head(const Head &head, int64_t size, float epsilon) {
    alignas(64) float x[kMaxHeadSize + kAlign], y[kMaxHeadSize + kAlign];
    for (int64_t i = 0; i < size; ++i) x[i] = head.from[i];
    for (int64_t i = size; i < round_up(size, kAlign); ++i) x[i] = 0;
    if (head.norm) {
        const float factor = inverse_rms(x, size, epsilon);
        for (int64_t i = 0; i < size; ++i) x[i] = x[i] * factor * head.norm[i];
    }
    if (head.cos) {
        const int64_t half = size / 2;
        for (int64_t i = 0; i < half; ++i) {
            y[i] = x[i] * head.cos[i] - x[half + i] * head.sin[i];
            y[half + i] = x[half + i] * head.cos[i] + x[i] * head.sin[i];
        }
        std::memcpy(x, y, static_cast<size_t>(size) * 4);
    }
    if (head.turn) {
        for (int64_t j = 0; j < size; ++j) y[j] = 0;
        for (int64_t i = 0; i < size; ++i)
            for (int64_t j = 0; j < size; ++j) y[j] += x[i] * head.turn[i * size + j];
        std::memcpy(x, y, static_cast<size_t>(size) * 4);
    }
    for (int64_t i = 0; i < size; ++i) x[i] *= head.factor;
    if (head.type == kFloat8) return write_float8(static_cast<uint8_t *>(head.to), x, size);
    write_numbers({head.to, size, head.type, 0}, 0, 0, x, size);
}

// A row of attention's result for a matrix that takes other numbers: see Rows.
void convert(const Rows &from, int64_t row, int64_t size, const Rows &to) {
    const int64_t whole = size / kLanes * kLanes;
    float part[kLanes];
    for (int64_t i = 0; i < whole; i += kLanes) {
        store(part, read_numbers(from, row, i));
        write_numbers(to, row, i, part, kLanes);
    }
    if (whole == size) return;
    const int64_t width = size_of(from.dtype);
    char numbers[kLanes * 4] = {};
    std::memcpy(numbers, static_cast<const char *>(from.data) + (row * from.stride + whole) * width, static_cast<size_t>((size - whole) * width));
    store(part, read_numbers({numbers, 0, from.dtype, 0}, 0, 0));
    write_numbers(to, row, whole, part, size - whole);
}

} // namespace magicdec::ISA
