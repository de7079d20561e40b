// The activations of ops/activation.py, on vectors.
#pragma once

#include <type_traits>

#include "simd.h"

enum Kind : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, QUICK_GELU = 5 };

template <int64_t KIND>
INLINE vf activate(vf x) {
    if constexpr (KIND == SILU) return x / (1.0f + vexp(-x));
    if constexpr (KIND == GELU) return 0.5f * x * verfc(x * -0.707106781f);
    if constexpr (KIND == GELU_TANH) {
        vf inner = 0.797884561f * fma(0.044715f * x * x, x, x);
        // 0.5 (1 + tanh y) = 1 / (1 + e^-2y): keeps its relative precision where tanh is near -1
        return x / (1.0f + vexp(-2.0f * inner));
    }
    if constexpr (KIND == QUICK_GELU) return x / (1.0f + vexp(-1.702f * x));
    const vf positive = x < 0.0f ? vf{} : x;
    return KIND == RELU2 ? positive * positive : positive;
}

// Calls body(std::integral_constant) of the kind.
template <class Body>
static inline void by_kind(int64_t kind, Body&& body) {
    if (kind == SILU) body(std::integral_constant<int64_t, SILU>{});
    if (kind == GELU) body(std::integral_constant<int64_t, GELU>{});
    if (kind == GELU_TANH) body(std::integral_constant<int64_t, GELU_TANH>{});
    if (kind == RELU) body(std::integral_constant<int64_t, RELU>{});
    if (kind == RELU2) body(std::integral_constant<int64_t, RELU2>{});
    if (kind == QUICK_GELU) body(std::integral_constant<int64_t, QUICK_GELU>{});
}
