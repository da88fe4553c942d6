// Vectors of 32-bit elements, as wide as the instruction set has them, with the few operations that the kernels need.
// Include inside a *_kernels.cpp only. Each operation works lane by lane in one fixed way, so the result for a row does
// not depend on what stands beside it; sums over lanes have one order.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"
#include "numbers.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace magicdec::ISA {

#if defined(MAGICDEC_AVX512)
constexpr int kLanes = 16;
constexpr int kBlockRows = 6, kBlockVectors = 4; // accumulators of `multiply`: they and their operands fill the registers
#elif defined(MAGICDEC_AVX2)
constexpr int kLanes = 8;
constexpr int kBlockRows = 6, kBlockVectors = 2;
#else
constexpr int kLanes = 4;
constexpr int kBlockRows = 4, kBlockVectors = 2;
#endif

// Arithmetic on them is written with operators. A lane may also hold a pair of bfloat16, or bits in transit.
typedef float Floats __attribute__((vector_size(4 * kLanes), may_alias));
typedef float FloatsAnywhere __attribute__((vector_size(4 * kLanes), may_alias, aligned(1)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), may_alias));

inline Floats load(const void *from) { return *static_cast<const FloatsAnywhere *>(from); }
inline void store(void *to, Floats x) { *static_cast<FloatsAnywhere *>(to) = x; }

inline Floats all(float x) {
#if defined(MAGICDEC_AVX512)
    return _mm512_set1_ps(x);
#elif defined(MAGICDEC_AVX2)
    return _mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(MAGICDEC_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(MAGICDEC_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// The greater; b where one of them is NaN.
inline Floats max(Floats a, Floats b) {
#if defined(MAGICDEC_AVX512)
    return _mm512_max_ps(a, b);
#elif defined(MAGICDEC_AVX2)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

inline float greatest(Floats x) {
#if defined(MAGICDEC_AVX512)
    return _mm512_reduce_max_ps(x);
#else
    float top = x[0];
    for (int lane = 1; lane < kLanes; ++lane) top = x[lane] > top ? x[lane] : top;
    return top;
#endif
}

inline float sum(Floats x) {
    float parts[kLanes];
    store(parts, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
    return parts[0];
}

// e^x for x <= 0, within 2 units in the last place; 1 at 0, and exactly 0 below the smallest float.
inline Floats exp(Floats x) {
    const Floats log2e = all(1.44269504f), ln2_high = all(-0.693359375f), ln2_low = all(2.12194440e-4f);
#if defined(MAGICDEC_AVX512)
    x = max(all(-150.0f), x);
    const Floats n = _mm512_roundscale_ps(x * log2e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Floats lowest = all(-87.3f), given = x, magic = all(12582912.0f); // adding 1.5 * 2^23 rounds to an integer
    x = max(lowest, x);
    const Floats shifted = x * log2e + magic, n = shifted - magic;
#endif
    Floats r = fma(n, ln2_high, x);
    r = fma(n, ln2_low, r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
#if defined(MAGICDEC_AVX512)
    return _mm512_scalef_ps(p, n);
#else
    const Ints power = ((Ints)shifted + 127) << 23; // the low bits of `shifted` are n
    const Floats y = p * (Floats)power;
    return given < lowest ? Floats{} : y;
#endif
}

// Rows of kLanes elements to columns, in place.
__attribute__((always_inline)) inline void transpose(Floats (&x)[kLanes]) {
#if defined(MAGICDEC_AVX512)
    Floats y[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; ++j) {
        const __m512d a = (__m512d)y[i + j], b = (__m512d)y[i + j + 2];
        x[i + 2 * j] = (Floats)_mm512_unpacklo_pd(a, b);
        x[i + 2 * j + 1] = (Floats)_mm512_unpackhi_pd(a, b);
    }
    // x[4 g + c] now holds, in its 128-bit part q, column 4 q + c of rows 4 g .. 4 g + 3.
    UNROLL for (int c = 0; c < 4; ++c) {
        const Floats low01 = _mm512_shuffle_f32x4(x[c], x[4 + c], 0x44), high01 = _mm512_shuffle_f32x4(x[c], x[4 + c], 0xee);
        const Floats low23 = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0x44),
                     high23 = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0xee);
        y[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        y[4 + c] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        y[8 + c] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        y[12 + c] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; ++i) x[i] = y[i];
#elif defined(MAGICDEC_AVX2)
    Floats y[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; ++j) {
        x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
        x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
    }
    UNROLL for (int c = 0; c < 4; ++c) {
        y[c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x20);
        y[4 + c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x31);
    }
    UNROLL for (int i = 0; i < 8; ++i) x[i] = y[i];
#else
    Floats y[kLanes];
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) y[i][j] = x[j][i];
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
#endif
}

// What a number type is in memory, and how kLanes of them become floats and back.
struct Float32 {
    typedef float Element;
    static Floats widen(const float *from) { return load(from); }
    static void narrow(float *to, Floats x) { store(to, x); }
};

struct BFloat16 {
    typedef uint16_t Element;
    static Floats widen(const uint16_t *from) {
#if defined(MAGICDEC_AVX512)
        return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(MAGICDEC_AVX2)
        return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
        Floats x;
        for (int lane = 0; lane < kLanes; ++lane) x[lane] = from_bfloat16(from[lane]);
        return x;
#endif
    }
    static void narrow(uint16_t *to, Floats x) {
#if defined(MAGICDEC_AVX512)
        _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = to_bfloat16(x[lane]);
#endif
    }
};

struct Float16 {
    typedef uint16_t Element;
    static Floats widen(const uint16_t *from) {
#if defined(MAGICDEC_AVX512)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(MAGICDEC_AVX2)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
        Floats x;
        for (int lane = 0; lane < kLanes; ++lane) x[lane] = from_float16(from[lane]);
        return x;
#endif
    }
    static void narrow(uint16_t *to, Floats x) {
#if defined(MAGICDEC_AVX512)
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(MAGICDEC_AVX2)
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = to_float16(x[lane]);
#endif
    }
};

struct Float8 { // E4M3, read only
    typedef uint8_t Element;
    static Floats widen(const uint8_t *from) {
        Floats x;
        for (int lane = 0; lane < kLanes; ++lane) x[lane] = from_float8(from[lane]);
        return x;
    }
};

// What one lane of an operand holds, and what a product adds to a lane of the sum.
struct Single { // a float
    static constexpr int kNumbers = 1;
    static Floats exp(Floats x) { return ISA::exp(x); }
    static Floats add_product(Floats sum, Floats a, Floats b) { return fma(a, b, sum); }
};
#if defined(MAGICDEC_AVX512)
struct Pair { // two bfloat16
    static constexpr int kNumbers = 2;
    // e^x for x <= 0, in two thirds of the instructions of exp(), where it will be rounded to bfloat16 anyway. Relative error:
    // that of the product's rounding, some |x| * 2^-24, and 10^-7 of the polynomial. 1 at 0, and 0 below the smallest float.
    static Floats exp(Floats x) {
        const Floats power = max(all(-150.0f), x) * all(1.44269504f);
        const Floats part = _mm512_reduce_ps(power, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); // behind the point
        Floats p = all(1.8671317e-3f); // of 2^part
        p = fma(p, part, all(9.0170270e-3f));
        p = fma(p, part, all(5.5799916e-2f));
        p = fma(p, part, all(2.4016444e-1f));
        p = fma(p, part, all(6.9315130e-1f));
        p = fma(p, part, all(1.0f));
        return _mm512_scalef_ps(p, power); // by the integer below it
    }
    static Floats add_product(Floats sum, Floats a, Floats b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

} // namespace magicdec::ISA
