// Mixtures of experts: each token's picked feed-forward networks, weighted and summed (ops/experts.py).
//
// Picks are sorted by expert. The two matrices of a picked expert are multiplied by the rows of all tokens that picked it, so
// they are read once; experts without picks are not read. The GEMMs are those of linear.cpp, whose bits depend on a row alone, or
// those of products.h with matrices as they are stored (of a GPU's experts in host memory). A token's results are summed in the order
// of its picks.

#include <algorithm>
#include <vector>

#include "activate.h"
#include "dtypes.h"
#include "pool.h"
#include "products.h"

EXPORT int64_t penstock_packed_size(int64_t n, int64_t k, int64_t dtype);
EXPORT void penstock_linear(const void* x, int64_t ldx, const void* w, const void* bias, void* out, int64_t rows, int64_t n,
                            int64_t k, int64_t dtype, int64_t out_f32);

namespace {

constexpr int64_t TOKENS = 512;  // of a pass: bounds the memory of results, and leaves enough rows to each expert
constexpr int64_t WORTH = 8192;  // elements from which on the thread pool is used

struct Arguments {
    const void* x;
    int64_t ldx;
    const int32_t* picks;  // [tokens, count]; -1 is nobody
    const float* weights;
    const void *up, *down;  // one expert behind the other
    const void *up_bias, *down_bias;
    void* out;
    int64_t tokens, count, experts, width, inner, kind, inward;
    int64_t stored;  // matrices are [n, k], not packed, and `out` is f32
    double alpha, limit, shift;
    int64_t dtype;
};

struct Glu {
    float alpha, limit, shift;
};

constexpr int64_t BAND = 16;  // rows of w of a task

// x [rows, k] times the transpose of w [n, k] as stored, plus a bias: out [rows, n]. n is a multiple of BAND.
template <class T, class O>
void stored_product(const T* x, const T* w, const T* bias, O* out, int64_t rows, int64_t n, int64_t k) {
    pool::parallel(n / BAND, [&](int64_t band) {
        const int64_t c = band * BAND;
        for (int64_t r = 0, count; r < rows; r += count) {
            const T* lines[] = {x + r * k, x + (r + 1) * k};
            float found[2 * BAND];
            count = std::min<int64_t>(2, rows - r);
            if (count == 2)
                products<T, float, 2>(lines, w + c * k, found, BAND, BAND, k);
            else
                products<T, float, 1>(lines, w + c * k, found, BAND, BAND, k);
            for (int64_t i = 0; i < count * BAND; i += VW) {
                const int64_t at = c + i % BAND;
                store(out + (r + i / BAND) * n + at, bias ? load(found + i) + load(bias + at) : load(found + i));
            }
        }
    });
}

// x [rows, 2 inner] -> out [rows, inner]: the gated activation of ops/experts.py::Glu.
template <class T, int64_t KIND>
void glu_rows(const T* x, T* out, int64_t rows, int64_t inner, Glu glu) {
    pool::parallel_if(rows * inner > WORTH, rows, [&](int64_t r) {
        const T *gates = x + r * 2 * inner, *ups = gates + inner;
        for (int64_t i = 0; i < inner; i += VW) {
            vf g = load_upto(gates + i, inner - i), u = load_upto(ups + i, inner - i);
            if (glu.limit > 0.0f) {
                const vf most = set1(glu.limit);
                g = g > most ? most : g;
                u = u > most ? most : u < -most ? -most : u;
            }
            g = glu.alpha == 1.0f ? activate<KIND>(g) : activate<KIND>(g * glu.alpha) / glu.alpha;
            store_upto(out + r * inner + i, g * (u + glu.shift), inner - i);
        }
    });
}

template <class T, int64_t KIND>
struct Pass {
    const Arguments& a;
    const int64_t first, tokens;  // tokens first to first + tokens

    const Glu glu{(float)a.alpha, (float)a.limit, (float)a.shift};
    const int64_t total = tokens * a.count;
    const int64_t up_size = a.stored ? 2 * a.inner * a.width : penstock_packed_size(2 * a.inner, a.width, a.dtype);
    const int64_t down_size = a.stored ? a.width * a.inner : penstock_packed_size(a.width, a.inner, a.dtype);
    const int32_t* const picks = a.picks + first * a.count;
    const float* const weights = a.weights + first * a.count;

    void run() const {
        std::vector<int64_t> starts(a.experts + 1), order(total), place(total, -1);
        for (int64_t i = 0; i < total; i++)
            if (picks[i] >= 0) starts[picks[i] + 1]++;
        for (int64_t e = 0; e < a.experts; e++) starts[e + 1] += starts[e];
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (int64_t i = 0; i < total; i++)
            if (picks[i] >= 0) order[place[i] = next[picks[i]]++] = i;
        int64_t most = 0;
        for (int64_t e = 0; e < a.experts; e++) most = std::max(most, starts[e + 1] - starts[e]);
        T* inputs = (T*)pool::scratch(6, most * (a.width + 3 * a.inner) * sizeof(T));
        float* results = (float*)pool::scratch(7, std::max<int64_t>(1, total * a.width) * sizeof(float));
        for (int64_t e = 0; e < a.experts; e++)
            if (starts[e + 1] > starts[e])
                expert(e, order.data() + starts[e], starts[e + 1] - starts[e], inputs, results + starts[e] * a.width);
        sum(place.data(), results);
    }

    // Results [rows, width] in f32 of the picks `mine` of one expert.
    void expert(int64_t e, const int64_t* mine, int64_t rows, T* inputs, float* results) const {
        T *both = inputs + rows * a.width, *inner = both + rows * 2 * a.inner;
        pool::parallel_if(rows * a.width > WORTH, rows, [&](int64_t r) {
            const T* from = (const T*)a.x + (first + mine[r] / a.count) * a.ldx;
            T* to = inputs + r * a.width;
            if (!a.inward) {
                std::copy(from, from + a.width, to);
                return;
            }
            for (int64_t i = 0; i < a.width; i += VW)
                store_upto(to + i, load_upto(from + i, a.width - i) * weights[mine[r]], a.width - i);
        });
        const T *up = (const T*)a.up + e * up_size, *down = (const T*)a.down + e * down_size;
        const T* up_bias = a.up_bias ? (const T*)a.up_bias + e * 2 * a.inner : nullptr;
        const T* down_bias = a.down_bias ? (const T*)a.down_bias + e * a.width : nullptr;
        if (a.stored)
            stored_product(inputs, up, up_bias, both, rows, 2 * a.inner, a.width);
        else
            penstock_linear(inputs, a.width, up, up_bias, both, rows, 2 * a.inner, a.width, a.dtype, 0);
        glu_rows<T, KIND>(both, inner, rows, a.inner, glu);
        if (a.stored)
            stored_product(inner, down, down_bias, results, rows, a.width, a.inner);
        else
            penstock_linear(inner, a.inner, down, down_bias, results, rows, a.width, a.inner, a.dtype, 1);
    }

    void sum(const int64_t* place, const float* results) const {
        pool::parallel_if(total * a.width > WORTH, tokens, [&](int64_t t) {
            const int64_t to = (first + t) * a.width;
            for (int64_t i = 0; i < a.width; i += VW) {
                vf total_of = {};
                for (int64_t k = t * a.count; k < (t + 1) * a.count; k++)
                    if (place[k] >= 0) {
                        const vf found = load_upto(results + place[k] * a.width + i, a.width - i);
                        total_of = a.inward ? total_of + found : fma(found, set1(weights[k]), total_of);
                    }
                if (a.stored)
                    store_upto((float*)a.out + to + i, total_of, a.width - i);
                else
                    store_upto((T*)a.out + to + i, total_of, a.width - i);
            }
        });
    }
};

}  // namespace

// Also a host function of CUDA streams (ops/experts_helped.py).
EXPORT void penstock_experts(const char* packed) {
    const Arguments a = *(const Arguments*)packed;
    by_dtype(a.dtype, [&](auto type) {
        using T = decltype(type);
        by_kind(a.kind, [&](auto constant) {
            for (int64_t first = 0; first < a.tokens; first += TOKENS)
                Pass<T, decltype(constant)::value>{a, first, std::min(TOKENS, a.tokens - first)}.run();
        });
    });
}
