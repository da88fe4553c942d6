// Rows of numbers of any type, written from floats and read as floats. Include inside a *_kernels.cpp only.
#pragma once

#include "linear.h"
#include "simd.h"

namespace magicdec::ISA {

// The nearest E4M3 numbers, saturated.
inline Floats round_to_float8(Floats x) {
    const Floats limit = all(448.0f), magnitude = max(x, -x);
    const Floats kept = magnitude > limit ? limit : magnitude; // NaN stays
    const Ints bits = (Ints)kept;
    const Floats normal = (Floats)((bits + 0x7ffff + (bits >> 20 & 1)) & ~0xfffff);
    const Floats magic = all(1.5f * (1 << 14)), small = kept + magic - magic; // multiples of 2^-9
    const Floats rounded = kept < all(0x1p-6f) ? small : normal;
    const Floats result = (Floats)((Ints)rounded | ((Ints)x & static_cast<int>(0x80000000)));
    return x == x ? result : x;
}

template <class Number> void write_as(void *to, Floats x, int64_t count) {
    typedef typename Number::Element Element;
    if (count >= kLanes) return Number::narrow(static_cast<Element *>(to), x);
    Element numbers[kLanes];
    Number::narrow(numbers, x);
    std::memcpy(to, numbers, static_cast<size_t>(count) * sizeof(Element));
}

// from [count], padded to kLanes.
inline void write_numbers(const Rows &rows, int64_t row, int64_t column, const float *from, int64_t count) {
    char *to = static_cast<char *>(rows.data) + (row * rows.stride + column) * size_of(rows.dtype);
    for (int64_t i = 0; i < count; i += kLanes) {
        Floats x = load(from + i);
        if (rows.fp8_factor != 0) x = round_to_float8(x * all(rows.fp8_factor));
        void *part = to + i * size_of(rows.dtype);
        if (rows.dtype == kFloat32) write_as<Float32>(part, x, count - i);
        else if (rows.dtype == kBFloat16) write_as<BFloat16>(part, x, count - i);
        else write_as<Float16>(part, x, count - i);
    }
}

// kLanes numbers.
inline Floats read_numbers(const Rows &rows, int64_t row, int64_t column) {
    const char *from = static_cast<const char *>(rows.data) + (row * rows.stride + column) * size_of(rows.dtype);
    if (rows.dtype == kFloat32) return load(from);
    const auto *halves = reinterpret_cast<const uint16_t *>(from);
    return rows.dtype == kBFloat16 ? BFloat16::widen(halves) : Float16::widen(halves);
}

} // namespace magicdec::ISA
