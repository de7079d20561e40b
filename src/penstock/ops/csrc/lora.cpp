// Adapters' deltas (ops/lora.py): for each row of a step that has an adapter, its x A^T, and that times B^T added to its result.
//
// A row is computed by one thread, so that its bits depend on nothing else.

#include <algorithm>
#include <vector>

#include "dtypes.h"
#include "pool.h"

namespace {

constexpr int64_t WORTH = 1 << 16;  // multiplications from which on the thread pool is used
constexpr int64_t PIECES = 4, WIDE = 4;  // ops/lora.py::MOST_PIECES; vectors of results in registers

struct Arguments {
    const void* x;  // or x A^T in float, if that is known
    int64_t ldx, known;
    const void *data, *gains;
    const int32_t *facts, *count, *tiles, *order;
    void* out;
    int64_t ldo;
    const void* bias;
    int64_t most, line, spread, told;  // tiles' width; strides of data, gains and facts
    int64_t pieces, sizes[PIECES], inputs, down, up, gain, fact;
};

// Four numbers rounded to T.
template <class T>
void narrow(const float* from, float* to) {
    const vf found = rounded<T>(load_upto(from, 4));
    for (int64_t i = 0; i < 4; i++) to[i] = found[i];
}

// inner [rank] = x A^T rounded to T, for A [rank, k]; rank is a multiple of 4.
template <class T>
void shrink(const T* x, const T* a, float* inner, int64_t rank, int64_t k) {
    for (int64_t j = 0; j < rank; j += 4) {
        vf sums[4] = {};
        const T* line = a + j * k;
        for (int64_t i = 0; i < k; i += VW) {
            const vf v = load_upto(x + i, k - i);
            for (int64_t r = 0; r < 4; r++) sums[r] = fma(v, load_upto(line + r * k + i, k - i), sums[r]);
        }
        float found[4];
        for (int64_t r = 0; r < 4; r++) found[r] = hsum(sums[r]);
        narrow<T>(found, inner + j);
    }
}

template <class T, class O>
void row(const Arguments& a, int64_t r, int64_t slot, float* inner) {
    const int32_t* told = a.facts + slot * a.told;
    const T *data = (const T*)a.data + slot * a.line, *x = (const T*)a.x + r * a.ldx;
    const int64_t width = told[0];
    int64_t n = 0, begin = 0;
    for (int64_t p = 0; p < a.pieces; p++) n += a.sizes[p];
    const T* gains = told[a.fact + PIECES] ? (const T*)a.gains + slot * a.spread + a.gain : nullptr;
    const T* bias = (const T*)a.bias;
    for (int64_t p = 0; p < a.pieces; begin += a.sizes[p++]) {
        const int64_t rank = told[a.fact + p], end = begin + a.sizes[p];
        if (!rank && !gains) continue;
        if (a.known)
            for (int64_t j = 0; j < rank; j += 4) narrow<T>((const float*)a.x + r * a.ldx + j, inner + j);
        else
            shrink(x, data + (a.down + p * a.inputs) * width, inner, rank, a.inputs);
        const T* up = data + a.up * width;
        O* out = (O*)a.out + r * a.ldo;
        for (int64_t c = begin; c < end; c += WIDE * VW) {
            vf sums[WIDE] = {};
            const int64_t vectors = std::min(WIDE, (end - c + VW - 1) / VW);
            for (int64_t j = 0; j < rank; j++)
                for (int64_t v = 0; v < vectors; v++)
                    sums[v] = fma(load_upto(up + j * n + c + v * VW, end - c - v * VW), set1(inner[j]), sums[v]);
            for (int64_t v = 0; v < vectors; v++) {
                const int64_t at = c + v * VW, left = end - at;
                vf total = load_upto(out + at, left);
                if (gains) {
                    const vf base = bias ? total - load_upto(bias + at, left) : total;
                    total = fma(base, load_upto(gains + at, left), total);
                }
                store_upto(out + at, total + sums[v], left);
            }
        }
    }
}

}  // namespace

EXPORT void penstock_lora(const char* packed, int64_t dtype, int64_t out_f32) {
    const Arguments a = *(const Arguments*)packed;
    std::vector<std::pair<int64_t, int64_t>> rows;
    int64_t width = 0, n = 0;
    for (int64_t t = 0; t < a.count[0]; t++) {
        const int64_t slot = a.tiles[t];
        width = std::max<int64_t>(width, a.facts[slot * a.told]);
        for (int64_t place = a.tiles[a.most + t]; place < a.tiles[2 * a.most + t]; place++) rows.emplace_back(a.order[place], slot);
    }
    for (int64_t p = 0; p < a.pieces; p++) n += a.sizes[p];
    by_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        pool::parallel_if((int64_t)rows.size() * width * (n + a.pieces * a.inputs) > WORTH, rows.size(), [&](int64_t i) {
            float* inner = (float*)pool::scratch(8, (width + 4) * sizeof(float));
            if (out_f32)
                row<T, float>(a, rows[i].first, rows[i].second, inner);
            else
                row<T, T>(a, rows[i].first, rows[i].second, inner);
        });
    });
}
