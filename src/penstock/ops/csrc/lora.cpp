// Adapters' deltas (ops/lora.py): for each row of a step that has an adapter, its x A^T, and that times B^T added to its result.
//
// A row is computed by one thread, and beside others as alone, so that its bits depend on nothing else.

#include <algorithm>
#include <vector>

#include "dtypes.h"
#include "pool.h"
#include "products.h"

namespace {

constexpr int64_t WORTH = 1 << 16;  // multiplications from which on the thread pool is used
constexpr int PIECES = 4, WIDE = 4;  // ops/lora.py::MOST_PIECES; vectors of results in registers

struct Arguments {
    const void* x;  // or x A^T in float, if that is known
    int64_t ldx, known;
    const int32_t *count, *tiles, *order;
    void* out;
    int64_t ldo;
    const void* bias;
    int64_t most;  // tiles' width
    const void *data, *gains;
    const int32_t* facts;
    int64_t line, spread, told;  // strides of data, gains and facts
    int64_t pieces, sizes[PIECES], inputs, down, up, gain, fact;
};

// N vectors of results of R rows, of which `left` numbers are wanted: sums[r][v] = inner times rows of B^T, n apart.
template <class T, int R, int N>
void grow(const T* up, int64_t n, const float* inner, int64_t room, int64_t rank, int64_t left, vf (*sums)[WIDE]) {
    vf found[R][N] = {};
    for (int64_t j = 0; j < rank; j++)
        for (int v = 0; v < N; v++) {
            const vf w = N > 1 ? load(up + j * n + v * VW) : load_upto(up + j * n, left);
            for (int r = 0; r < R; r++) found[r][v] = fma(w, set1(inner[r * room + j]), found[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N; v++) sums[r][v] = found[r][v];
}

// R rows of one slot: the matrices are loaded once for all of them. A row's sums do not depend on R.
template <class T, class O, int R>
void several(const Arguments& a, const int32_t* rows, int64_t slot, float* inner) {
    const int32_t* told = a.facts + slot * a.told;
    const T* data = (const T*)a.data + slot * a.line;
    const int64_t width = told[0];
    int64_t n = 0, begin = 0;
    for (int64_t p = 0; p < a.pieces; p++) n += a.sizes[p];
    const T* gains = told[a.fact + PIECES] ? (const T*)a.gains + slot * a.spread + a.gain : nullptr;
    const T *bias = (const T*)a.bias, *up = data + a.up * width, *x[R];
    O* out[R];
    for (int r = 0; r < R; r++) x[r] = (const T*)a.x + rows[r] * a.ldx, out[r] = (O*)a.out + rows[r] * a.ldo;
    for (int64_t p = 0; p < a.pieces; begin += a.sizes[p++]) {
        const int64_t rank = told[a.fact + p], end = begin + a.sizes[p];
        if (!rank && !gains) continue;
        if (!a.known)
            products<T, T, R>(x, data + (a.down + p * a.inputs) * width, inner, width, rank, a.inputs);
        else
            for (int r = 0; r < R; r++)
                for (int64_t j = 0; j < rank; j += VW)
                    store(inner + r * width + j, rounded<T>(load((const float*)a.x + rows[r] * a.ldx + j)));
        for (int64_t c = begin; c < end;) {
            vf sums[R][WIDE];
            const int64_t vectors = c + WIDE * VW <= end ? WIDE : 1;
            if (vectors == WIDE)
                grow<T, R, WIDE>(up + c, n, inner, width, rank, 0, sums);
            else
                grow<T, R, 1>(up + c, n, inner, width, rank, end - c, sums);
            for (int r = 0; r < R; r++)
                for (int64_t v = 0; v < vectors; v++) {
                    const int64_t at = c + v * VW, left = end - at;
                    vf total = load_upto(out[r] + at, left);
                    if (gains) {
                        const vf base = bias ? total - load_upto(bias + at, left) : total;
                        total = fma(base, load_upto(gains + at, left), total);
                    }
                    store_upto(out[r] + at, total + sums[r][v], left);
                }
            c += vectors * VW;
        }
    }
}

}  // namespace

EXPORT void penstock_lora(const char* packed, int64_t dtype, int64_t out_f32) {
    const Arguments a = *(const Arguments*)packed;
    struct Run {
        const int32_t* rows;
        int64_t count, slot;
    };
    std::vector<Run> runs;
    int64_t width = 0, n = 0, total = 0;
    for (int64_t t = 0; t < a.count[0]; t++) total += a.tiles[2 * a.most + t] - a.tiles[a.most + t];
    // As many rows together as fit the registers, but no fewer runs than threads.
    const int64_t most = std::min<int64_t>(VW >= 16 ? 4 : 2, std::max<int64_t>(1, total / pool::threads()));
    for (int64_t t = 0; t < a.count[0]; t++) {
        width = std::max<int64_t>(width, a.facts[a.tiles[t] * a.told]);
        const int64_t end = a.tiles[2 * a.most + t];
        for (int64_t place = a.tiles[a.most + t]; place < end;) {
            const int64_t left = std::min(most, end - place), count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            runs.push_back({a.order + place, count, a.tiles[t]});
            place += count;
        }
    }
    for (int64_t p = 0; p < a.pieces; p++) n += a.sizes[p];
    by_dtype(dtype, [&]<class T>(T) {
        pool::parallel_if(total * width * (n + a.pieces * a.inputs) > WORTH, runs.size(), [&](int64_t i) {
            float* inner = (float*)pool::scratch(8, 4 * (width + 4) * sizeof(float));
            by_output<T>(out_f32, [&]<class O>(O) {
                const auto serve = runs[i].count == 4   ? several<T, O, 4>
                                   : runs[i].count == 2 ? several<T, O, 2>
                                                        : several<T, O, 1>;
                serve(a, runs[i].rows, runs[i].slot, inner);
            });
        });
    });
}
