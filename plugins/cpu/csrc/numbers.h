// The number types of tensors, and single numbers of the narrow ones to float and back. All functions are `static
// inline`: each *_kernels.cpp must have its own.
#pragma once

#include <cstdint>
#include <cstring>

namespace magicdec {

// plugins/cpu/numbers.py has the same order.
enum DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8 };

static inline int64_t size_of(DType dtype) { return dtype == kFloat32 ? 4 : dtype == kFloat8 ? 1 : 2; }

static inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

static inline float from_bfloat16(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

static inline uint16_t to_bfloat16(float x) { // to nearest even
    const uint32_t bits = as_bits(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_float16(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, magnitude = x & 0x7fff;
    if (magnitude >= 0x7c00) return as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f)); // subnormals included
}

static inline uint16_t to_float16(float x) { // to nearest even
    const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00); // rounds to 65536 or more
    if (magnitude < 0x38800000) // a multiple of 2^-24: adding 0.5 leaves just those bits
        return static_cast<uint16_t>(sign | (as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f)));
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

static inline float from_float8(uint8_t x) { // E4M3: no infinity, one NaN
    const uint32_t sign = static_cast<uint32_t>(x & 0x80) << 24, magnitude = x & 0x7f;
    if (magnitude == 0x7f) return as_float(sign | 0x7fc00000);
    return as_float(sign | as_bits(as_float(magnitude << 20) * 0x1p120f)); // subnormals included
}

static inline uint8_t to_float8(float x) { // E4M3, to nearest even, saturated
    const uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffff;
    const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
    if (magnitude > 0x7f800000) return sign | 0x7f;
    if (magnitude >= as_bits(448.0f)) return sign | 0x7e;
    if (magnitude < as_bits(0x1p-6f)) // a multiple of 2^-9: adding 2^14 leaves just those bits
        return static_cast<uint8_t>(sign | (as_bits(as_float(magnitude) + 0x1p14f) - as_bits(0x1p14f)));
    return static_cast<uint8_t>(sign | (magnitude - 0x3c000000 + 0x7ffff + (magnitude >> 20 & 1)) >> 20);
}

} // namespace magicdec
