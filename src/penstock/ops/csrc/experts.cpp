// Mixtures of experts: each token's picked feed-forward networks, weighted and summed (ops/experts.py).
//
// Picks are sorted by expert. The two matrices of a picked expert are multiplied by the rows of all tokens that picked it, so
// they are read once; experts without picks are not read. The GEMMs are those of linear.cpp, whose bits depend on a row alone,
// those of products.h with matrices as they are stored (of a GPU's experts in host memory), or those of coded.cpp, in which the
// threads meet once for all experts. A token's results are summed in the order of its picks.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "activate.h"
#include "coded.h"
#include "dtypes.h"
#include "pool.h"
#include "products.h"

EXPORT int64_t penstock_packed_size(int64_t n, int64_t k, int64_t dtype);
EXPORT void penstock_linear(const void* x, int64_t ldx, const void* w, const void* bias, void* out, int64_t rows, int64_t n,
                            int64_t k, int64_t dtype, int64_t out_f32);

namespace {

constexpr int64_t TOKENS = 512;  // of a pass: bounds the memory of results, and leaves enough rows to each expert
constexpr int64_t WORTH = 8192;  // elements from which on the thread pool is used

// Matrices lie one expert behind the other: packed (linear.cpp), as they are stored, [n, k], or as a CodedCall of each.
enum Form : int64_t { PACKED, STORED, CODED };

struct Arguments {
    const void* x;
    int64_t ldx;
    const int32_t* picks;  // [tokens, count]; -1 is nobody
    const float* weights;
    const void *up, *down;
    const void *up_bias, *down_bias;
    void* out;
    int64_t tokens, count, experts, width, inner, kind, inward;
    int64_t form;  // of the matrices; STORED: `out` is f32
    double alpha, limit, shift;
    int64_t dtype;
};

struct Glu { float alpha, limit, shift; };

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
        const int64_t live = starts[a.experts];
        T* inputs = (T*)pool::scratch(6, std::max<int64_t>(1, live * (a.width + 3 * a.inner)) * sizeof(T));
        T *both = inputs + live * a.width, *inner = both + live * 2 * a.inner;
        float* results = (float*)pool::scratch(7, std::max<int64_t>(1, live * a.width) * sizeof(float));
        pool::parallel_if(live * a.width > WORTH, live, [&](int64_t r) {
            const T* from = (const T*)a.x + (first + order[r] / a.count) * a.ldx;
            T* to = inputs + r * a.width;
            if (!a.inward) {
                std::copy(from, from + a.width, to);
                return;
            }
            for (int64_t i = 0; i < a.width; i += VW)
                store_upto(to + i, load_upto(from + i, a.width - i) * weights[order[r]], a.width - i);
        });
        multiply(starts, inputs, a.up, a.up_bias, both, 2 * a.inner, a.width);
        glu_rows<T, KIND>(both, inner, live, a.inner, glu);
        multiply(starts, inner, a.down, a.down_bias, results, a.width, a.inner);
        sum(place.data(), results);
    }

    // Rows of x, sorted by expert, times their experts' matrices [n, k], plus biases.
    template <class O>
    void multiply(const std::vector<int64_t>& starts, const T* x, const void* stack, const void* biases, O* out, int64_t n,
                  int64_t k) const {
        constexpr int64_t wide = !std::is_same_v<T, O>;
        std::vector<CodedCall> calls;
        for (int64_t e = 0; e < a.experts; e++) {
            const int64_t at = starts[e], rows = starts[e + 1] - at;
            if (!rows) continue;
            const T *matrices = (const T*)stack, *bias = biases ? (const T*)biases + e * n : nullptr;
            if (a.form == PACKED) {
                const T* matrix = matrices + e * penstock_packed_size(n, k, a.dtype);
                penstock_linear(x + at * k, k, matrix, bias, out + at * n, rows, n, k, a.dtype, wide);
            } else if (a.form == STORED) {
                stored_product(x + at * k, matrices + e * n * k, bias, out + at * n, rows, n, k);
            } else {
                CodedCall call = ((const CodedCall*)stack)[e];
                call.x = x + at * k, call.ldx = k, call.bias = bias, call.out = out + at * n;
                call.rows = rows, call.dtype = a.dtype | wide << 8;
                calls.push_back(call);
            }
        }
        if (!calls.empty()) penstock_coded(calls.data(), (int64_t)calls.size());
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
                by_output<T>(a.form == STORED, [&]<class O>(O) { store_upto((O*)a.out + to + i, total_of, a.width - i); });
            }
        });
    }
};

}  // namespace

// Also a host function of CUDA streams (ops/experts_helped.py).
EXPORT void penstock_experts(const char* packed) {
    const Arguments a = *(const Arguments*)packed;
    by_dtype(a.dtype, [&]<class T>(T) {
        by_kind(a.kind, [&](auto constant) {
            for (int64_t first = 0; first < a.tokens; first += TOKENS)
                Pass<T, decltype(constant)::value>{a, first, std::min(TOKENS, a.tokens - first)}.run();
        });
    });
}
