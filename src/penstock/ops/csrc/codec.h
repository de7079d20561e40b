// Codecs of the KV cache (ops/codec.py): one head's vector from and to its codes and scales. Rounding is the reference's.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "dtypes.h"

// One byte of codes.
struct code { uint8_t bits; };

enum Element : int64_t { E4M3, E5M2, INT8, PACKED };
enum Rule : int64_t { FIXED, PEAK, SIGNED, RANGE, NORM };
enum ScaleType : int64_t { SCALE_F32, SCALE_F16, SCALE_E4M3 };

struct Coding {
    const void* scales;  // the first byte of the field; strides are in elements
    int64_t page, head, slot;
    const float* table;  // values by code, or null
    int64_t bits, group, element, rule, gguf, scale_type;
    double fixed, peak, least;

    const uint8_t* at(int64_t page_id, int64_t kv_head, int64_t place) const {
        return (const uint8_t*)scales + (page_id * page + kv_head * head + place * slot) * scale_bytes();
    }
    int64_t scale_bytes() const { return scale_type == SCALE_F32 ? 4 : scale_type == SCALE_F16 ? 2 : 1; }
};

// A minifloat with `exponent` bits of exponent and 7 - exponent of mantissa: its bits in place are the number times a power of two,
// subnormals included.
template <int EXPONENT>
INLINE float from_minifloat(uint8_t bits) {
    const uint32_t wide = (uint32_t)(bits & 0x7f) << (16 + EXPONENT) | (uint32_t)(bits & 0x80) << 24;
    return std::bit_cast<float>(wide) * (EXPONENT == 4 ? 0x1p120f : 0x1p112f);
}

// x, at most the largest finite number, rounded to nearest even.
template <int EXPONENT>
INLINE uint8_t to_minifloat(float x) {
    constexpr int SHIFT = 16 + EXPONENT, BIAS = (1 << (EXPONENT - 1)) - 1;
    uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t sign = u >> 24 & 0x80;
    u &= 0x7fffffffu;
    if (u < (uint32_t)(128 - BIAS) << 23) {  // subnormal: the sum's last place is the smallest step
        const uint32_t magic = (uint32_t)(128 - BIAS + SHIFT) << 23;
        const float sum = std::bit_cast<float>(u) + std::bit_cast<float>(magic);
        return (uint8_t)((std::bit_cast<uint32_t>(sum) - magic) | sign);
    }
    u += ((u >> SHIFT) & 1) + (1u << (SHIFT - 1)) - 1 - ((uint32_t)(127 - BIAS) << 23);
    return (uint8_t)(u >> SHIFT | sign);
}

INLINE float load_scale(int64_t type, const uint8_t* p) {
    if (type == SCALE_E4M3) return from_minifloat<4>(*p);
    if (type == SCALE_F16) return load_first((const f16*)p, 1)[0];
    return unaligned<float>(p);
}

// Stores x and returns it as it is stored.
INLINE float store_scale(int64_t type, float x, uint8_t* p) {
    if (type == SCALE_E4M3)
        *p = to_minifloat<4>(std::min(x, 448.0f));
    else if (type == SCALE_F16)
        store_first((f16*)p, set1(x), 1);
    else
        memcpy(p, &x, 4);
    return load_scale(type, p);
}

INLINE void decode_values(const Coding& c, const code* codes, int64_t size, float* out) {
    const uint8_t* from = (const uint8_t*)codes;
    if (c.bits == 8) {
        if (c.element == E4M3)
            for (int64_t i = 0; i < size; i++) out[i] = from_minifloat<4>(from[i]);
        else if (c.element == E5M2)
            for (int64_t i = 0; i < size; i++) out[i] = from_minifloat<5>(from[i]);
        else
            for (int64_t i = 0; i < size; i++) out[i] = (float)(int8_t)from[i];
        return;
    }
    uint8_t wide[8];
    if (c.bits == 4) {
        if (c.table)
            for (int64_t i = 0; i < size / 2; i++) out[i] = c.table[from[i] & 15], out[i + size / 2] = c.table[from[i] >> 4];
        else
            for (int64_t i = 0; i < size / 2; i++) out[i] = (float)(from[i] & 15), out[i + size / 2] = (float)(from[i] >> 4);
    } else {
        for (int64_t i = 0; i < size; i += 8, from += 3) {
            const uint32_t word = from[0] | from[1] << 8 | from[2] << 16;
            for (int j = 0; j < 8; j++) wide[j] = word >> (3 * j) & 7;
            for (int j = 0; j < 8; j++) out[i + j] = c.table ? c.table[wide[j]] : (float)wide[j];
        }
    }
    if (c.rule == SIGNED)
        for (int64_t i = 0; i < size; i++) out[i] -= 8.0f;
}

INLINE void decode_row(const Coding& c, const code* codes, const uint8_t* scales, int64_t size, float* out) {
    decode_values(c, codes, size, out);
    if (c.rule == FIXED) {
        for (int64_t i = 0; i < size; i++) out[i] *= (float)c.fixed;
        return;
    }
    const int64_t group = c.group ? c.group : size, each = c.scale_bytes();
    for (int64_t i = 0; i < size; i += group, scales += each * (c.rule == RANGE ? 2 : 1)) {
        const float scale = load_scale(c.scale_type, scales);
        const float shift = c.rule == RANGE ? load_scale(c.scale_type, scales + each) : 0.0f;
        for (int64_t j = i; j < i + group; j++) out[j] = out[j] * scale + shift;
    }
}

// A number in units of its scale as a code of few bits.
INLINE int encode_value(const Coding& c, float x) {
    if (c.table) {
        const int half = 1 << (c.bits - 1);
        const float size = std::fabs(x);
        int found = 0;
        for (int i = 0; i + 1 < half; i++) {
            const float middle = (c.table[i] + c.table[i + 1]) / 2;
            found += i & 1 ? size >= middle : size > middle;
        }
        return found + (x < 0 ? half : 0);
    }
    if (c.rule == SIGNED) return (int)std::min(std::max(std::trunc(x + 8.5f), 0.0f), (float)c.peak);
    const float whole = c.gguf ? std::copysign(std::floor(std::fabs(x) + 0.5f), x) : std::nearbyint(x);
    return (int)std::min(std::max(whole, c.element == INT8 ? -(float)c.peak : 0.0f), (float)c.peak);
}

// x [size] to codes and scales; x is overwritten.
INLINE void encode_row(const Coding& c, float* x, int64_t size, uint8_t* codes, uint8_t* scales) {
    const int64_t group = c.rule == FIXED || !c.group ? size : c.group;
    const float limit = (float)c.peak;
    for (int64_t i = 0; i < size; i += group) {
        float *g = x + i, scale = (float)c.fixed, low = g[0], high = g[0], top = 0.0f, sum = 0.0f, largest = 0.0f;
        for (int64_t j = 0; j < group; j++) {
            low = std::min(low, g[j]), high = std::max(high, g[j]), sum += g[j] * g[j];
            if (std::fabs(g[j]) > top) top = std::fabs(g[j]), largest = g[j];
        }
        uint8_t* beside = scales + i / group * c.scale_bytes() * (c.rule == RANGE ? 2 : 1);
        if (c.rule != FIXED) {
            if (c.rule == RANGE) {
                low = store_scale(c.scale_type, low, beside + c.scale_bytes()), top = 0.0f;
                for (int64_t j = 0; j < group; j++) g[j] -= low, top = std::max(top, g[j]);
            }
            if (c.rule == NORM) top = std::sqrt(sum / (float)group) * limit;
            // The signed peak times the same numbers as the reference, for the same rounding.
            const float exact = c.rule == SIGNED ? largest * -limit / 8.0f / limit : top / limit;
            scale = store_scale(c.scale_type, c.gguf ? exact : std::max(exact, (float)c.least), beside);
            if (c.gguf) scale = exact;
        }
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        for (int64_t j = 0; j < group; j++) g[j] = c.rule == FIXED ? g[j] / scale : g[j] * inverse;
        if (c.rule == NORM) {
            float length = 0.0f;
            for (int64_t j = 0; j < group; j++) {
                const float value = c.table[encode_value(c, g[j])];
                length += value * value;
            }
            store_scale(c.scale_type, std::sqrt(sum) / std::sqrt(length), beside);
        }
    }
    for (int64_t i = 0; i < size && c.bits == 8; i++) {
        const float cut = std::min(std::max(x[i], -limit), limit);
        codes[i] = c.element == E4M3   ? to_minifloat<4>(cut)
                   : c.element == E5M2 ? to_minifloat<5>(cut)
                                       : (uint8_t)(int8_t)encode_value(c, x[i]);
    }
    for (int64_t i = 0; i < size / 2 && c.bits == 4; i++)
        codes[i] = (uint8_t)(encode_value(c, x[i]) | encode_value(c, x[i + size / 2]) << 4);
    for (int64_t i = 0; i < size && c.bits == 3; i += 8) {
        uint32_t word = 0;
        for (int j = 0; j < 8; j++) word |= (uint32_t)encode_value(c, x[i + j]) << (3 * j);
        for (int j = 0; j < 3; j++) *codes++ = (uint8_t)(word >> (8 * j));
    }
}
