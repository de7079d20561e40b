// Entry points of quantized GEMMs (coded.h), the packing of codes, and embedding look-ups in packed codes.

#include "coded.h"

#include <sys/mman.h>

#if defined(__AVX512F__)
void run_coded_vnni(const void* call);

namespace {
bool vnni() {
    static const bool found = __builtin_cpu_supports("avx512vnni");
    return found;
}
}  // namespace
#else
namespace {
bool vnni() { return false; }
}  // namespace
#endif

namespace {

// The place of column k of row `lane` in a panel: byte and shift of the low (or all) bits, then of a 6-bit code's high bits.
struct Place {
    int64_t byte;
    int shift;
    int64_t high_byte;
    int high_shift;
};

Place place(int64_t bits, int64_t lane, int64_t k) {
    const int64_t block = k / BLOCK * (PANEL * BLOCK * bits / 8), quad = k % BLOCK / 4, in = lane * 4 + k % 4;
    constexpr int64_t LINE = PANEL * 4;
    if (bits == 8) return {block + quad * LINE + in, 0, 0, 0};
    return {block + quad / 2 * LINE + in, (int)(quad % 2) * 4, block + (4 + quad / 4) * LINE + in, (int)(quad % 4) * 2};
}

// The order of the 32 codes of a block of columns in a row: a byte each; as pairs, the first low; the first half low
// and the second high, for a block, or for two blocks in a row of a superblock of 256.
enum Form { BYTES, PAIRS, HALVES, CHUNKS };
struct Source {
    const uint8_t* rows;
    int64_t row_bytes, block_bytes, offset, form;  // block_bytes: of 32 columns, of CHUNKS of 256
};

constexpr uint32_t LOW = 0x0F0F0F0F, HIGH_TWO = 0x03030303;

// The codes of block b of a row, a byte each, zeros beyond column k.
void read_block(const Source& s, int64_t row, int64_t b, int64_t k, uint32_t* word) {
    const int64_t left = std::min<int64_t>(BLOCK, k - b * BLOCK);
    const uint8_t* at = s.rows + row * s.row_bytes + s.offset + (s.form == CHUNKS ? b / 8 : b) * s.block_bytes;
    uint8_t bytes[BLOCK] = {};
    if (s.form == BYTES) {
        memcpy(word, memcpy(bytes, at, left), BLOCK);
    } else if (s.form == PAIRS) {
        memcpy(bytes, at, (left + 1) / 2);
        for (int q = 0; q < 8; q++) {
            const uint32_t two = bytes[2 * q] | (uint32_t)bytes[2 * q + 1] << 16;
            word[q] = (two | two << 4) & LOW;
        }
    } else {
        memcpy(word, s.form == HALVES ? at : at + b % 8 / 2 * BLOCK, s.form == HALVES ? BLOCK / 2 : BLOCK);
        for (int q = 7; q >= 0; q--)
            word[q] = (s.form == HALVES ? word[q % 4] >> q / 4 * 4 : word[q] >> b % 2 * 4) & LOW;
    }
}

}  // namespace

// The codes of a matrix [n, k] (8 bits: the bits of the signed number) to panels.
EXPORT void penstock_coded_pack(const uint8_t* rows, int64_t row_bytes, int64_t block_bytes, int64_t offset, int64_t form,
                                int64_t n, int64_t k, int64_t bits, uint8_t* to) {
    const Source source{rows, row_bytes, block_bytes, offset, form};
    const int64_t blocks = (k + BLOCK - 1) / BLOCK, block_size = PANEL * BLOCK * bits / 8;
    const uint32_t flip = bits == 8 && vnni() ? 0x80808080u : 0;
    pool::parallel_if(n * k > 65536, (n + PANEL - 1) / PANEL, [&](int64_t p) {
        for (int64_t lane = 0; lane < PANEL; lane++)
            for (int64_t b = 0; b < blocks; b++) {
                uint32_t word[8] = {}, *line = (uint32_t*)(to + (p * blocks + b) * block_size) + lane;
                if (p * PANEL + lane < n) read_block(source, p * PANEL + lane, b, k, word);
                for (int q = 0; bits == 8 && q < 8; q++) line[q * PANEL] = word[q] ^ flip;
                for (int q = 0; bits < 8 && q < 4; q++) line[q * PANEL] = (word[2 * q] & LOW) | (word[2 * q + 1] & LOW) << 4;
                for (int q = 0; bits == 6 && q < 8; q++) {
                    uint32_t& high = line[(4 + q / 4) * PANEL];
                    high = (q % 4 ? high : 0) | (word[q] >> 4 & HIGH_TWO) << q % 4 * 2;
                }
            }
    });
}

// Rows `ids` of the codes, as they were given to penstock_coded_pack. All ids are valid.
EXPORT void penstock_coded_rows(const int64_t* ids, int64_t rows, const uint8_t* panels, int64_t k, int64_t bits, uint8_t* out) {
    const int64_t blocks = (k + BLOCK - 1) / BLOCK, panel_bytes = blocks * (PANEL * BLOCK * bits / 8);
    const uint8_t flip = bits == 8 && vnni() ? 128 : 0;
    pool::parallel_if(rows * k > 16384, rows, [&](int64_t r) {
        const uint8_t* panel = panels + ids[r] / PANEL * panel_bytes;
        for (int64_t i = 0; i < k; i++) {
            const Place at = place(bits, ids[r] % PANEL, i);
            uint8_t code = (uint8_t)(bits == 8 ? panel[at.byte] ^ flip : panel[at.byte] >> at.shift & 15);
            if (bits == 6) code |= (uint8_t)((panel[at.high_byte] >> at.high_shift & 3) << 4);
            out[r * k + i] = code;
        }
    });
}

EXPORT void penstock_coded(const void* call) {
    const CodedCall& c = *(const CodedCall*)call;
    if (c.rows == 0) return;
#if defined(__AVX512F__)
    if (vnni()) return run_coded_vnni(call);
#endif
    run(c);
}
