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

}  // namespace

// codes: uint8 [n, k], one code per byte (8 bits: the bits of the signed number); to: panels, zeroed before.
EXPORT void penstock_coded_pack(const uint8_t* codes, int64_t n, int64_t k, int64_t bits, uint8_t* to) {
    const int64_t blocks = (k + BLOCK - 1) / BLOCK, panel_bytes = blocks * (PANEL * BLOCK * bits / 8);
    const uint8_t flip = bits == 8 && vnni() ? 128 : 0;
    pool::parallel_if(n * k > 65536, (n + PANEL - 1) / PANEL, [&](int64_t p) {
        uint8_t* panel = to + p * panel_bytes;
        if (flip) memset(panel, flip, panel_bytes);
        for (int64_t lane = 0; lane < std::min<int64_t>(PANEL, n - p * PANEL); lane++)
            for (int64_t i = 0; i < k; i++) {
                const uint8_t code = codes[(p * PANEL + lane) * k + i];
                const Place at = place(bits, lane, i);
                if (bits == 8) {
                    panel[at.byte] = code ^ flip;
                } else {
                    panel[at.byte] |= (uint8_t)((code & 15) << at.shift);
                    if (bits == 6) panel[at.high_byte] |= (uint8_t)((code >> 4) << at.high_shift);
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
