// The codes of element types that Python passes, and the dispatch of templates by them.
#pragma once

#include "simd.h"

enum DType : int64_t { F32 = 0, F16 = 1, BF16 = 2, FP8 = 3 };  // FP8: of stored weights alone

#define EXPORT extern "C" __attribute__((visibility("default")))

// Calls body(T{}) for the type of the code.
template <class Body>
static inline void by_dtype(int64_t code, Body&& body) {
    if (code == F32)
        body(float{});
    else if (code == F16)
        body(f16{});
    else
        body(bf16{});
}

// Calls body(O{}) for the type of results: float if they are `wide`, else T.
template <class T, class Body>
static INLINE void by_output(bool wide, Body&& body) {
    if (wide)
        body(float{});
    else
        body(T{});
}
