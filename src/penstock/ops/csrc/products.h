// Products of a few rows with a matrix as it is stored, row by row.
#pragma once

#include "simd.h"

// out [R][n] = x w^T rounded to O, for w [n, k] and R rows of x; n is a multiple of VW. `room` lies between rows of out. There
// are always VW sums at once, whose lanes are added up together.
template <class T, class O, int R>
void products(const T* const* x, const T* w, float* out, int64_t room, int64_t n, int64_t k) {
    constexpr int C = VW / R;
    for (int64_t j = 0; j < n; j += C) {
        vf sums[VW] = {};
        const T* line = w + j * k;
        auto add = [&](int64_t i, auto load) {
            vf v[R];
            for (int r = 0; r < R; r++) v[r] = load(x[r] + i);
            for (int c = 0; c < C; c++) {
                const vf column = load(line + c * k + i);
                for (int r = 0; r < R; r++) sums[r * C + c] = fma(v[r], column, sums[r * C + c]);
            }
        };
        int64_t i = 0;
        for (; i + VW <= k; i += VW) add(i, [](const T* p) { return ::load(p); });
        if (i < k) add(i, [&](const T* p) { return load_first(p, k - i); });
        transpose(sums);
        for (int half = VW / 2; half; half /= 2)
            for (int s = 0; s < half; s++) sums[s] += sums[s + half];
        const vf found = rounded<O>(sums[0]);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) out[r * room + j + c] = found[r * C + c];
    }
}
