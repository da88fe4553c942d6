// Linear layers at the memory's speed for a few rows and at that of a matrix product for many. See linear.h.
//
// Rows are packed in blocks of up to kMaxRows, column by column, so that a step of a block's product reads one piece of
// the panel and one of the block. The panel's numbers become what the product takes at the moment of use.
#include "isa.h"
#include "kernels.h"
#include "linear.h"
#include "rows.h"
#include "simd.h"

namespace magicdec::ISA {
namespace {

#if defined(MAGICDEC_AVX512)
constexpr int kMaxRows = 12, kVectors = 2;
#elif defined(MAGICDEC_AVX2)
constexpr int kMaxRows = 6, kVectors = 2;
#else
constexpr int kMaxRows = 4, kVectors = 2;
#endif
constexpr int64_t kPart = 64;       // inputs whose products are summed on their own where operands are floats
constexpr int64_t kPrefetch = 8192; // bytes ahead, in a stream that goes on with the next panel

Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }
Ints load_ints(const void *from) { return (Ints)load(from); }

// Weights of `Vectors` vectors as operands. One step covers kStep units of kNumbers inputs; sums of kPart units are made
// on their own (0: all at once). raw() reads what a step needs, operand() makes one unit's operand of it.
struct Float32Panel {
    typedef Single Operand;
    static constexpr int64_t kStep = 1, kUnits = kPart;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) { return panel + (unit * kPanel + column) * 4; }
    static Floats raw(const uint8_t *panel, int64_t unit, int64_t column) { return load(at(panel, unit, column)); }
    static Floats operand(Floats raw, int) { return raw; }
};

struct Float16Panel {
    typedef Single Operand;
    static constexpr int64_t kStep = 1, kUnits = kPart;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) { return panel + (unit * kPanel + column) * 2; }
    static Floats raw(const uint8_t *panel, int64_t unit, int64_t column) {
        return Float16::widen(reinterpret_cast<const uint16_t *>(at(panel, unit, column)));
    }
    static Floats operand(Floats raw, int) { return raw; }
};

struct BFloat16Panel {
    typedef Single Operand;
    static constexpr int64_t kStep = 2, kUnits = kPart;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) {
        return panel + (unit / 2 * kPanel + column) * 4;
    }
    static Ints raw(const uint8_t *panel, int64_t unit, int64_t column) {
        return load_ints(at(panel, unit, column));
    }
    static Floats operand(Ints raw, int unit) { return (Floats)(unit == 0 ? raw << 16 : raw & static_cast<int>(0xffff0000)); }
};

struct Int8Panel {
    typedef Single Operand;
    static constexpr int64_t kStep = 2, kUnits = kPart;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) {
        return panel + (unit / 2 * kPanel + column) * 2;
    }
    static Ints raw(const uint8_t *panel, int64_t unit, int64_t column) {
        const uint8_t *from = at(panel, unit, column);
#if defined(MAGICDEC_AVX512)
        return (Ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(MAGICDEC_AVX2)
        return (Ints)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
        int16_t pairs[kLanes];
        std::memcpy(pairs, from, sizeof pairs);
        return Ints{pairs[0], pairs[1], pairs[2], pairs[3]};
#endif
    }
    static Floats operand(Ints raw, int unit) { return as_floats(unit == 0 ? raw << 24 >> 24 : raw >> 8); }
};

// Word c of a step holds inputs 0, 2, 4, 6 of its column in its low half, 1, 3, 5, 7 in its high half.
struct Int4Panel {
    typedef Single Operand;
    static constexpr int64_t kStep = 8, kUnits = kGroup;
    static constexpr int64_t kGroupBytes = (kGroup / 2 + 4) * kPanel;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) {
        return panel + unit / kGroup * kGroupBytes + (unit % kGroup / 8 * kPanel + column) * 4;
    }
    static Ints raw(const uint8_t *panel, int64_t unit, int64_t column) {
        return load_ints(at(panel, unit, column));
    }
    static Floats operand(Ints raw, int unit) { return as_floats(raw >> (unit % 2 * 16 + unit / 2 * 4) & 15); }
};

#if defined(MAGICDEC_AVX512)
struct BFloat16Pairs {
    typedef Pair Operand;
    static constexpr int64_t kStep = 1, kUnits = 0;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) { return panel + (unit * kPanel + column) * 4; }
    static Floats raw(const uint8_t *panel, int64_t unit, int64_t column) { return load(at(panel, unit, column)); }
    static Floats operand(Floats raw, int) { return raw; }
};

struct Int8Pairs { // every int8 is a bfloat16
    typedef Pair Operand;
    static constexpr int64_t kStep = 1, kUnits = 0;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) { return panel + (unit * kPanel + column) * 2; }
    static Floats raw(const uint8_t *panel, int64_t unit, int64_t column) {
        const auto *from = reinterpret_cast<const __m128i *>(at(panel, unit, column));
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
        return (Floats)_mm512_cvtne2ps_pbh(high, low);
    }
    static Floats operand(Floats raw, int) { return raw; }
};

// The bfloat16 of 0 .. 15, twice: a look-up goes by 5 bits, the fifth being the next number's.
struct NibbleTable {
    alignas(64) uint16_t numbers[32];
    constexpr NibbleTable() : numbers() {
        for (int i = 0; i < 32; ++i) {
            const int x = i % 16, top = x >= 8 ? 3 : x >= 4 ? 2 : x >= 2 ? 1 : 0;
            numbers[i] = static_cast<uint16_t>(x == 0 ? 0 : (127 + top) << 7 | (x - (1 << top)) << (7 - top));
        }
    }
};
constexpr NibbleTable kNibbles;

struct Int4Pairs {
    typedef Pair Operand;
    static constexpr int64_t kStep = 4, kUnits = kGroup / 2;
    static const uint8_t *at(const uint8_t *panel, int64_t unit, int64_t column) { return Int4Panel::at(panel, 2 * unit, column); }
    static __m512i raw(const uint8_t *panel, int64_t unit, int64_t column) {
        return (__m512i)Int4Panel::raw(panel, 2 * unit, column);
    }
    static Floats operand(__m512i raw, int unit) {
        const __m512i table = _mm512_load_si512(kNibbles.numbers);
        return (Floats)_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, static_cast<unsigned>(4 * unit)), table);
    }
};
#endif

template <class Panel> constexpr bool kScaledGroups = Panel::kStep * Panel::Operand::kNumbers == 8;

// The product of a block of Rows packed rows [units, Rows] with one panel, to [Rows, 32].
// group_sums: int4, of each row's groups [groups, Rows].
template <class Panel, int Rows>
void multiply_panel(const uint8_t *panel, const float *block, const float *group_sums, int64_t units, float *to) {
    typedef typename Panel::Operand Operand;
    constexpr int kColumns = kVectors * kLanes;
    const int64_t part = Panel::kUnits == 0 ? units : Panel::kUnits;
    for (int64_t column = 0; column < kPanel; column += kColumns, to += kColumns)
        for (int64_t start = 0; start < units; start += part) {
            const int64_t stop = start + part < units ? start + part : units;
            Floats sums[Rows][kVectors] = {};
            for (int64_t unit = start; unit < stop; unit += Panel::kStep) {
                decltype(Panel::raw(panel, 0, 0)) raw[kVectors];
                UNROLL for (int v = 0; v < kVectors; ++v) {
                    raw[v] = Panel::raw(panel, unit, column + v * kLanes);
                    __builtin_prefetch(Panel::at(panel, unit, column + v * kLanes) + kPrefetch);
                }
                UNROLL for (int u = 0; u < Panel::kStep; ++u) {
                    Floats weights[kVectors];
                    UNROLL for (int v = 0; v < kVectors; ++v) weights[v] = Panel::operand(raw[v], u);
                    UNROLL for (int r = 0; r < Rows; ++r) {
                        const Floats x = all(block[(unit + u) * Rows + r]);
                        UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = Operand::add_product(sums[r][v], x, weights[v]);
                    }
                }
            }
            UNROLL for (int v = 0; v < kVectors; ++v) {
                if constexpr (kScaledGroups<Panel>) {
                    const int64_t group = start / part;
                    const uint8_t *end = panel + (group + 1) * Int4Panel::kGroupBytes - 4 * kPanel;
                    const auto *halves = reinterpret_cast<const uint16_t *>(end) + column + v * kLanes;
                    const Floats scale = Float16::widen(halves), offset = Float16::widen(halves + kPanel);
                    UNROLL for (int r = 0; r < Rows; ++r) {
                        float *total = to + r * kPanel + v * kLanes;
                        const Floats before = start == 0 ? Floats{} : load(total);
                        store(total, fma(scale, sums[r][v], fma(offset, all(group_sums[group * Rows + r]), before)));
                    }
                } else {
                    UNROLL for (int r = 0; r < Rows; ++r) {
                        float *total = to + r * kPanel + v * kLanes;
                        store(total, start == 0 ? sums[r][v] : load(total) + sums[r][v]);
                    }
                }
            }
        }
}

template <class Panel, int Rows = kMaxRows>
void multiply_rows(int64_t rows, const uint8_t *panel, const float *block, const float *group_sums, int64_t units, float *to) {
    if constexpr (Rows > 1)
        if (rows < Rows) return multiply_rows<Panel, Rows - 1>(rows, panel, block, group_sums, units, to);
    multiply_panel<Panel, Rows>(panel, block, group_sums, units, to);
}

Floats silu(Floats x) {
    const Floats one = all(1.0f), e = exp(-max(x, -x));
    return x * ((x > Floats{} ? one : e) / (one + e));
}

void finish_panel(const Matrix &matrix, const Product &product, int64_t panel, int64_t row, int64_t rows, float *tile) {
    const int64_t width = product.finish == kGate ? kPanel / 2 : kPanel, column = panel * width;
    const int64_t count = product.columns - column < width ? product.columns - column : width;
    if (count <= 0) return;
    for (int64_t r = 0; r < rows; ++r) {
        float *y = tile + r * kPanel;
        for (int64_t i = 0; i < kPanel; i += kLanes) {
            Floats x = load(y + i);
            if (matrix.scales) x *= load(matrix.scales + panel * kPanel + i);
            if (matrix.bias) x += load(matrix.bias + panel * kPanel + i);
            store(y + i, x);
        }
        if (product.finish == kGate) {
            for (int64_t i = 0; i < width; i += kLanes) store(y + i, silu(load(y + i)) * load(y + width + i));
            write_numbers(product.to, row + r, column, y, count);
            continue;
        }
        float *to = static_cast<float *>(product.to.data) + (row + r) * product.to.stride + column;
        if (product.finish == kAdd)
            for (int64_t i = 0; i < count; ++i) to[i] += y[i];
        else
            for (int64_t i = 0; i < count; ++i) to[i] = y[i];
    }
}

// `count` operands of a row, kLanes at most.
template <class Operand> void read_operands(const Rows &x, int64_t row, int64_t input, int64_t count, float *to) {
    const int64_t size = size_of(x.dtype);
    const char *from = static_cast<const char *>(x.data) + (row * x.stride + input) * size;
    if (Operand::kNumbers * size == 4) {
        std::memcpy(to, from, static_cast<size_t>(count) * 4);
    } else if (count == kLanes) {
        store(to, read_numbers(x, row, input));
    } else {
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t half = reinterpret_cast<const uint16_t *>(from)[i];
            to[i] = x.dtype == kBFloat16 ? from_bfloat16(half) : from_float16(half);
        }
    }
}

// Rows as operands: to [units, rows].
template <class Operand> void pack(const Rows &x, int64_t row, int64_t rows, int64_t units, float *to) {
    for (int64_t r = 0; r < rows; ++r) {
        float operands[kLanes];
        for (int64_t unit = 0; unit < units; unit += kLanes) {
            const int64_t count = units - unit < kLanes ? units - unit : kLanes;
            read_operands<Operand>(x, row + r, unit * Operand::kNumbers, count, operands);
            for (int64_t i = 0; i < count; ++i) to[(unit + i) * rows + r] = operands[i];
        }
    }
}

// Sums of each group of inputs: to [groups, rows].
void sum_groups(const Rows &x, int64_t row, int64_t rows, int64_t inputs, float *to) {
    for (int64_t group = 0; group < inputs / kGroup; ++group)
        for (int64_t r = 0; r < rows; ++r) {
            Floats parts = {};
            for (int64_t i = 0; i < kGroup; i += kLanes) parts += read_numbers(x, row + r, group * kGroup + i);
            to[group * rows + r] = sum(parts);
        }
}

template <class Panel>
void multiply_all(
    const Matrix &matrix, const Rows &x, int64_t rows, const Share &panels, const Product &product, float *memory, bool again
) {
    const int64_t units = matrix.inputs / Panel::Operand::kNumbers, groups = matrix.inputs / kGroup;
    const int64_t bytes = panel_bytes(matrix.format, matrix.inputs);
    float *sums = memory + kRowsAtOnce * units;
    alignas(64) float tile[kMaxRows * kPanel];
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
        const int64_t count = rows - first < kRowsAtOnce ? rows - first : kRowsAtOnce;
        const int64_t blocks = (count + kMaxRows - 1) / kMaxRows;
        for (int64_t block = 0; block < blocks && !again; ++block) {
            const int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
            pack<typename Panel::Operand>(x, first + start, stop - start, units, memory + start * units);
            if (kScaledGroups<Panel>) sum_groups(x, first + start, stop - start, matrix.inputs, sums + start * groups);
        }
        for (int64_t panel = panels.first; panel < panels.last; ++panel)
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
                multiply_rows<Panel>(
                    stop - start, matrix.panels + panel * bytes, memory + start * units, sums + start * groups, units, tile
                );
                finish_panel(matrix, product, panel, first + start, stop - start, tile);
            }
    }
}

} // namespace

void linear(
    const Matrix &matrix, const Rows &x, int64_t rows, const Share &panels, const Product &product, float *memory, bool again
) {
#if defined(MAGICDEC_AVX512)
    if (x.dtype == kBFloat16 && matrix.format == kFormatBFloat16)
        return multiply_all<BFloat16Pairs>(matrix, x, rows, panels, product, memory, again);
    if (x.dtype == kBFloat16 && matrix.format == kFormatInt8)
        return multiply_all<Int8Pairs>(matrix, x, rows, panels, product, memory, again);
    if (x.dtype == kBFloat16 && matrix.format == kFormatInt4)
        return multiply_all<Int4Pairs>(matrix, x, rows, panels, product, memory, again);
#endif
    switch (matrix.format) {
    case kFormatFloat32: return multiply_all<Float32Panel>(matrix, x, rows, panels, product, memory, again);
    case kFormatBFloat16: return multiply_all<BFloat16Panel>(matrix, x, rows, panels, product, memory, again);
    case kFormatFloat16: return multiply_all<Float16Panel>(matrix, x, rows, panels, product, memory, again);
    case kFormatInt8: return multiply_all<Int8Panel>(matrix, x, rows, panels, product, memory, again);
    case kFormatInt4: return multiply_all<Int4Panel>(matrix, x, rows, panels, product, memory, again);
    }
}

} // namespace magicdec::ISA
