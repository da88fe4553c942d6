// Linear layers y[T, N] = x[T, K] W[N, K]^T + bias over weights laid out in panels of 32 outputs.
//
// An output is one sum over K in one order, by one thread: the work is split over panels only. So a row's result has
// the same bits whatever rows stand beside it, however many there are, and on any number of threads.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace magicdec {

constexpr int64_t kPanel = 32; // outputs
constexpr int64_t kGroup = 32; // int4: inputs that share a scale and an offset

// How a panel lies in memory; plugins/cpu/linear.py lays it out and has the same order.
enum Format : int32_t {
    kFormatFloat32,  // [K][32]
    kFormatBFloat16, // [K / 2][32][2]
    kFormatFloat16,  // [K][32]
    kFormatInt8,     // [K / 2][32][2]
    kFormatInt4,     // for each group: [4][32] words of 8 numbers, float16 scales [32], float16 offsets [32]
};

static inline int64_t panel_bytes(Format format, int64_t inputs) {
    switch (format) {
    case kFormatFloat32: return inputs * kPanel * 4;
    case kFormatInt8: return inputs * kPanel;
    case kFormatInt4: return inputs / kGroup * (kGroup / 2 + 4) * kPanel;
    default: return inputs * kPanel * 2;
    }
}

// plugins/cpu/linear.py declares it once more.
struct Matrix {
    const uint8_t *panels;
    const float *scales; // of the sums [panels, 32], or null
    const float *bias;   // [panels, 32], or null
    int64_t inputs, num_panels;
    float fp8_factor; // 0, or the inputs are E4M3 numbers (held as bfloat16): what they are multiplied with before rounding
    Format format;
};

// Rows of float32, bfloat16 or float16; stride in elements.
struct Rows {
    void *data;
    int64_t stride;
    DType dtype;
    float fp8_factor; // 0, or x * fp8_factor is rounded to an E4M3 number when x is written
};

enum Finish : int32_t {
    kStore, // y, float32
    kAdd,   // added to what stands there, float32
    kGate,  // silu(y of a panel's first half) * its second half: 16 results a panel, of any type
};

struct Product {
    Finish finish;
    Rows to;
    int64_t columns; // results a row
};

// Rows that are packed at a time, and the memory that a thread needs for it, in floats.
constexpr int64_t kRowsAtOnce = 96;
static inline int64_t linear_thread_size(int64_t inputs) { return kRowsAtOnce * (inputs + inputs / kGroup); }

} // namespace magicdec
