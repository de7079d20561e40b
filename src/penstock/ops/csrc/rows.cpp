// Row-wise operations: norms, rotary embedding with the cache write, activations. Arithmetic is f32, rounded where
// the references round; a row's result depends on that row alone.

#include <algorithm>
#include <type_traits>

#include "activate.h"
#include "codec.h"
#include "pool.h"

namespace {

constexpr int64_t WORTH = 32768;  // elements from which on the thread pool is used

// Sums f(x, at, left) over a row in four accumulators: the order of summation depends on the width alone.
template <class F>
INLINE float row_sum(int64_t width, F&& f) {
    vf sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * VW <= width; i += 4 * VW)
        for (int u = 0; u < 4; u++) sums[u] += f(i + u * VW);
    for (int u = 0; i < width; i += VW, u++) sums[u] += f(i);
    return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T, class W>
INLINE void rms_row(const T* x, const W* weight, T* out, int64_t width, float eps, float offset) {
    const float mean_square = row_sum(width, [&](int64_t i) {
        vf v = load_upto(x + i, width - i);
        return v * v;
    }) / (float)width;
    const vf scale = set1(1.0f / __builtin_sqrtf(mean_square + eps));
    for (int64_t i = 0; i < width; i += VW)
        store_upto(out + i, load_upto(x + i, width - i) * scale * (load_upto(weight + i, width - i) + offset), width - i);
}

template <class T, class W>
void layer_row(const T* x, const W* weight, const W* bias, T* out, int64_t width, float eps) {
    const float mean = row_sum(width, [&](int64_t i) { return load_upto(x + i, width - i); }) / (float)width;
    const float variance = row_sum(width, [&](int64_t i) {
        vf v = load_upto(x + i, width - i) - mean;
        v = iota() < (int32_t)std::min<int64_t>(VW, width - i) ? v : vf{};
        return v * v;
    }) / (float)width;
    const vf scale = set1(1.0f / __builtin_sqrtf(variance + eps));
    for (int64_t i = 0; i < width; i += VW) {
        vf v = (load_upto(x + i, width - i) - mean) * scale;
        if (weight) v *= load_upto(weight + i, width - i);
        if (bias) v += load_upto(bias + i, width - i);
        store_upto(out + i, v, width - i);
    }
}

// Calls body(T{}, W{}, row) for each row of a norm, for the types of the two codes.
template <class Body>
void norm_rows(int64_t rows, int64_t width, int64_t dtype, int64_t weight_dtype, Body&& body) {
    by_dtype(dtype, [&](auto type) {
        by_dtype(weight_dtype, [&](auto weight_type) {
            pool::parallel_if(rows * width > WORTH, rows, [&](int64_t r) { body(type, weight_type, r); });
        });
    });
}

// Rotates the first 2 * half dimensions of a head in place.
INLINE void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += VW) {
        const int64_t left = half - i;
        vf a = load_upto(head + i, left), b = load_upto(head + half + i, left);
        vf c = load_upto(cos + i, left), s = load_upto(sin + i, left);
        store_upto(head + i, a * c - b * s, left);
        store_upto(head + half + i, b * c + a * s, left);
    }
}

// The same with element 2i rotating with element 2i + 1.
INLINE void rotate_pairs(float* head, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cos[i] - b * sin[i];
        head[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

template <class From, class To>
INLINE void copy(const From* from, To* to, int64_t n) {
    for (int64_t i = 0; i < n; i += VW) store_upto(to + i, load_upto(from + i, n - i), n - i);
}

struct Rope {
    const void *q, *k, *v;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    const int32_t* positions;
    const int64_t* slots;
    void *k_cache, *v_cache;
    int64_t k_page, k_kv, k_slot, v_page, v_kv, v_slot;
    const float *cos, *sin;
    const void *q_norm, *k_norm;
    void* out;
    int64_t tokens, heads, kv_heads, size, page, half, interleaved;
};

template <class T>
void rope_write(const Rope& a, float eps, float offset) {
    pool::parallel_if(a.tokens * (a.heads + 2 * a.kv_heads) * a.size > WORTH, a.tokens, [&](int64_t t) {
        float* head = (float*)pool::scratch(2, (a.size + VW) * sizeof(float) * 2);
        T* narrow = (T*)(head + a.size + VW);
        const float* cos = a.cos ? a.cos + a.positions[t] * a.half : nullptr;
        const float* sin = a.cos ? a.sin + a.positions[t] * a.half : nullptr;
        const int64_t place = a.slots ? a.slots[t] : t, page = place / a.page, slot = place % a.page;
        auto turn = [&](const T* from, const void* norm, T* to) {
            if (norm) {
                rms_row(from, (const T*)norm, narrow, a.size, eps, offset);
                from = narrow;
            }
            if (cos) {
                copy(from, head, a.size);
                (a.interleaved ? rotate_pairs : rotate)(head, cos, sin, a.half);
                copy(head, to, a.size);
            } else {
                copy(from, to, a.size);
            }
        };
        for (int64_t h = 0; h < a.heads; h++)
            turn((const T*)a.q + t * a.q_token + h * a.q_head, a.q_norm, (T*)a.out + (t * a.heads + h) * a.size);
        if (place < 0) return;  // padding
        for (int64_t h = 0; h < a.kv_heads; h++) {
            turn((const T*)a.k + t * a.k_token + h * a.k_head, a.k_norm,
                 (T*)a.k_cache + page * a.k_page + h * a.k_kv + slot * a.k_slot);
            if (a.v) copy((const T*)a.v + t * a.v_token + h * a.v_head,
                 (T*)a.v_cache + page * a.v_page + h * a.v_kv + slot * a.v_slot, a.size);
        }
    });
}

struct CacheWrite {
    const void *k, *v;
    int64_t k_token, k_head, v_token, v_head;
    const int64_t* slots;
    void *k_cache, *v_cache;
    int64_t k_page, k_kv, k_slot, v_page, v_kv, v_slot, tokens, kv_heads, size, page;
    Coding key, value;
};

template <class T>
void cache_write(const CacheWrite& a) {
    pool::parallel_if(a.tokens * 2 * a.kv_heads * a.size > WORTH / 4, a.tokens, [&](int64_t t) {
        if (a.slots[t] < 0) return;  // padding
        float* row = (float*)pool::scratch(2, (a.size + VW) * sizeof(float));
        const int64_t page = a.slots[t] / a.page, slot = a.slots[t] % a.page;
        for (int64_t h = 0; h < a.kv_heads; h++) {
            copy((const T*)a.k + t * a.k_token + h * a.k_head, row, a.size);
            encode_row(a.key, row, a.size, (uint8_t*)a.k_cache + page * a.k_page + h * a.k_kv + slot * a.k_slot,
                       (uint8_t*)a.key.at(page, h, slot));
            copy((const T*)a.v + t * a.v_token + h * a.v_head, row, a.size);
            encode_row(a.value, row, a.size, (uint8_t*)a.v_cache + page * a.v_page + h * a.v_kv + slot * a.v_slot,
                       (uint8_t*)a.value.at(page, h, slot));
        }
    });
}

template <class T, int64_t KIND>
void activation_of(const T* x, int64_t stride, T* out, int64_t rows, int64_t width, bool gated) {
    constexpr int64_t PIECE = 4096;
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    pool::parallel_if(rows * width > WORTH / 4, rows * pieces, [&](int64_t index) {
        const int64_t r = index / pieces, begin = index % pieces * PIECE, end = std::min(width, begin + PIECE);
        const T* from = x + r * stride;
        T* to = out + r * width;
        for (int64_t i = begin; i < end; i += VW) {
            vf v = activate<KIND>(load_upto(from + i, end - i));
            if (gated) v *= load_upto(from + width + i, end - i);
            store_upto(to + i, v, end - i);
        }
    });
}

}  // namespace

// x has `outer` x `inner` rows at the two strides; out is contiguous.
EXPORT void penstock_rms_norm(const void* x, const void* weight, void* out, int64_t outer, int64_t inner, int64_t outer_stride,
                              int64_t inner_stride, int64_t width, double eps, double offset, int64_t dtype,
                              int64_t weight_dtype) {
    norm_rows(outer * inner, width, dtype, weight_dtype, [&]<class T, class W>(T, W, int64_t r) {
        rms_row((const T*)x + r / inner * outer_stride + r % inner * inner_stride, (const W*)weight, (T*)out + r * width, width,
                (float)eps, (float)offset);
    });
}

// residual += x, rounded; out = rms_norm(residual).
EXPORT void penstock_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t x_stride,
                                  int64_t residual_stride, int64_t width, double eps, double offset, int64_t dtype,
                                  int64_t weight_dtype) {
    norm_rows(rows, width, dtype, weight_dtype, [&]<class T, class W>(T, W, int64_t r) {
        const T* from = (const T*)x + r * x_stride;
        T* sum = (T*)residual + r * residual_stride;
        for (int64_t i = 0; i < width; i += VW)
            store_upto(sum + i, load_upto(from + i, width - i) + load_upto(sum + i, width - i), width - i);
        rms_row(sum, (const W*)weight, (T*)out + r * width, width, (float)eps, (float)offset);
    });
}

// weight and bias may be null; both have weight_dtype.
EXPORT void penstock_layer_norm(const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t stride,
                                int64_t width, double eps, int64_t dtype, int64_t weight_dtype) {
    norm_rows(rows, width, dtype, weight_dtype, [&]<class T, class W>(T, W, int64_t r) {
        layer_row((const T*)x + r * stride, (const W*)weight, (const W*)bias, (T*)out + r * width, width, (float)eps);
    });
}

// Everything is of one type but the tables.
EXPORT void penstock_rope_write(const Rope* arguments, double eps, double offset, int64_t dtype) {
    by_dtype(dtype, [&]<class T>(T) { rope_write<T>(*arguments, (float)eps, (float)offset); });
}

EXPORT void penstock_cache_write(const CacheWrite* arguments, int64_t dtype) {
    by_dtype(dtype, [&]<class T>(T) { cache_write<T>(*arguments); });
}

EXPORT void penstock_activation(const void* x, int64_t stride, void* out, int64_t rows, int64_t width, int64_t kind,
                                int64_t gated, int64_t dtype) {
    by_dtype(dtype, [&]<class T>(T) {
        by_kind(kind, [&](auto constant) {
            activation_of<T, decltype(constant)::value>((const T*)x, stride, (T*)out, rows, width, gated);
        });
    });
}

// Adds -inf to the logits that a mask of `words` words excludes; mask i belongs to line lines[i]. Tokens beyond it are excluded.
EXPORT void penstock_mask(float* logits, int64_t stride, int64_t vocab, const uint32_t* bits, int64_t words,
                          const int32_t* lines, int64_t count) {
    constexpr float OUT = -__builtin_inff();
    pool::parallel_if(count * vocab > WORTH, count, [&](int64_t i) {
        float* x = logits + lines[i] * stride;
        for (int64_t first = 0; first < vocab; first += 32) {
            const uint32_t word = first / 32 < words ? bits[i * words + first / 32] : 0;
            if (word == ~0u) continue;
            const int64_t left = std::min<int64_t>(32, vocab - first);
            for (int64_t j = 0; j < left; j++) x[first + j] += word >> j & 1 ? 0.0f : OUT;
        }
    });
}
