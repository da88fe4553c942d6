// The bits of counter-based draws; runtime/sampling/draws.py says what they are for and makes the same ones with numpy.
#include <cstdint>

namespace {

// Philox4x64-10 (Salmon et al. 2011) of one counter and a key whose second word is 0.
inline void philox(uint64_t block, uint64_t position, uint64_t purpose, uint64_t key, uint64_t out[4]) {
    using Wide = unsigned __int128;
    uint64_t a = block, b = position, c = purpose, d = 0, key1 = 0;
    for (int round = 0; round < 10; ++round) {
        const Wide first = Wide{0xD2E7470EE14C6C93} * a, second = Wide{0xCA5A826395121157} * c;
        a = static_cast<uint64_t>(second >> 64) ^ b ^ key;
        b = static_cast<uint64_t>(second);
        c = static_cast<uint64_t>(first >> 64) ^ d ^ key1;
        d = static_cast<uint64_t>(first);
        key += 0x9E3779B97F4A7C15;
        key1 += 0xBB67AE8584CAA73B;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

} // namespace

// out [rows, count]: the first words of each (seed, position) for one purpose.
extern "C" __attribute__((visibility("default"))) void magicdec_draws(const uint64_t *seeds, const uint64_t *positions,
                                                                      uint64_t purpose, int64_t rows, int64_t count,
                                                                      uint64_t *out) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t first = 0; first < count; first += 4) {
            uint64_t words[4];
            philox(first / 4 + 1, positions[row], purpose, seeds[row], words); // numpy steps before the first block
            for (int64_t i = first; i < count && i < first + 4; ++i) *out++ = words[i - first];
        }
    }
}
