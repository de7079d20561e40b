// Vectors of floats, their conversions from and to bf16 and f16, and a few functions on them. One source for every
// instruction set: mostly GCC's vector extensions, and some intrinsics. No operation of the engine is here.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VW = 16;
#elif defined(__AVX2__)
constexpr int VW = 8;
#else
constexpr int VW = 4;
#endif

#define INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static INLINE vf set1(float x) { return x - vf{}; }
static INLINE vi iota() {
    vi v;
    for (int i = 0; i < VW; i++) v[i] = i;
    return v;
}

static INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
static INLINE vf vabs(vf a) { return (vf)((vu)a & 0x7fffffffu); }
static INLINE vf copysign(vf magnitude, vf sign) { return (vf)((vu)magnitude | ((vu)sign & 0x80000000u)); }

// Sums and maxima over the lanes, always in the same order.
template <class F>
static INLINE float fold(vf v, F&& f) {
    float a[VW];
    memcpy(a, &v, sizeof v);
    for (int w = VW / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] = f(a[i], a[i + w]);
    return a[0];
}
static INLINE float hsum(vf v) { return fold(v, [](float a, float b) { return a + b; }); }
static INLINE float hmax(vf v) { return fold(v, [](float a, float b) { return a > b ? a : b; }); }

// ---- loads and stores, unaligned; every type widens to f32 exactly and is rounded to nearest even on the way back

// The bytes at p as a V.
template <class V>
static INLINE V unaligned(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

static INLINE vf load(const float* p) { return unaligned<vf>(p); }
static INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static INLINE vf load(const bf16* p) { return (vf)(__builtin_convertvector(unaligned<vh>(p), vu) << 16); }
static INLINE void store(bf16* p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (u >> 16) | 0x40u;
    vh h = __builtin_convertvector(v != v ? nan : rounded, vh);
    memcpy(p, &h, sizeof h);
}

static INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vu u = __builtin_convertvector(unaligned<vh>(p), vu);
    // Exponent and mantissa in place, scaled by 2^112 to make up for the bias: right for subnormals too.
    vf v = (vf)((u & 0x7fffu) << 13) * 0x1p112f;
    vu special = (u & 0x7c00u) == 0x7c00u ? (vu{} + 0x7f800000u) : vu{};
    return (vf)((vu)v | special | ((u & 0x8000u) << 16));
#endif
}
static INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    vu u = (vu)v & 0x7fffffffu;
    vu normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
    // Below 2^-14 the sum with 0.5 has a unit in the last place of 2^-24, which is f16's smallest step.
    vu small = (vu)((vf)u + 0.5f) - 0x3f000000u;
    vu out = u < 0x38800000u ? small : normal;
    out = u >= 0x47800000u ? (vu{} + 0x7c00u) : out;
    out = u > 0x7f800000u ? (vu{} + 0x7e00u) : out;
    vh h = __builtin_convertvector(out | (((vu)v >> 16) & 0x8000u), vh);
    memcpy(p, &h, sizeof h);
#endif
}

// Bytes, widened. GCC 12 converts vectors of bytes one by one.
static INLINE vi load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadu_si64(p));
#else
    return vi{p[0], p[1], p[2], p[3]};
#endif
}

// The first n < VW lanes, none if n is negative; the others read as zero and are not written.
template <class T>
static INLINE vf load_first(const T* p, int64_t n) {
    T buffer[VW] = {};
    for (int64_t i = 0; i < n; i++) buffer[i] = p[i];
    return load(buffer);
}
template <class T>
static INLINE void store_first(T* p, vf v, int64_t n) {
    T buffer[VW];
    store(buffer, v);
    for (int64_t i = 0; i < n; i++) p[i] = buffer[i];
}
#if defined(__AVX512F__)
static INLINE __mmask16 lanes(int64_t n) { return (__mmask16)(n > 0 ? (1u << n) - 1 : 0); }
template <>
INLINE vf load_first(const float* p, int64_t n) { return (vf)_mm512_maskz_loadu_ps(lanes(n), p); }
template <>
INLINE void store_first(float* p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), (__m512)v); }
template <>
INLINE vf load_first(const bf16* p, int64_t n) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), p)), 16);
}
template <>
INLINE vf load_first(const f16* p, int64_t n) { return (vf)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(n), p)); }
#endif
template <class T>
static INLINE vf load_upto(const T* p, int64_t n) { return n >= VW ? load(p) : load_first(p, n); }
template <class T>
static INLINE void store_upto(T* p, vf v, int64_t n) {
    if (n >= VW)
        store(p, v);
    else
        store_first(p, v, n);
}

// v rounded to T and back, as if stored and loaded.
template <class T>
static INLINE vf rounded(vf v) {
    T buffer[VW];
    store(buffer, v);
    return load(buffer);
}
template <>
INLINE vf rounded<float>(vf v) { return v; }

// Rows become columns by log2(VW) rounds of interleaving row i with row i + VW / 2.
template <class V>
static INLINE void transpose(V* rows) {
    V other[VW];
    vi low, high;
    for (int i = 0; i < VW / 2; i++) {
        low[2 * i] = i, low[2 * i + 1] = VW + i;
        high[2 * i] = VW / 2 + i, high[2 * i + 1] = VW + VW / 2 + i;
    }
#pragma GCC unroll 4
    for (int step = 1; step < VW; step *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < VW / 2; i++) {
            other[2 * i] = __builtin_shuffle(rows[i], rows[i + VW / 2], low);
            other[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + VW / 2], high);
        }
        for (int i = 0; i < VW; i++) rows[i] = other[i];
    }
}

// ---- functions

// e^x, relative error below 2e-7; exactly 1 at 0 and exactly 0 below -87 (where results would be subnormal).
static INLINE vf vexp(vf x) {
    vf c = x > 88.0f ? set1(88.0f) : x;
    const vf shift = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which stays in the low bits
    vf t = fma(c, set1(1.44269504f), shift);
    vf n = t - shift;
    vf r = fma(n, set1(-0.693145752f), c);  // ln 2 in two parts, the first with trailing zero bits
    r = fma(n, set1(-1.42860677e-6f), r);
    vf p = set1(0.00139411189f);  // (e^r - 1) / r, fitted at Chebyshev nodes: error 1e-8
    p = fma(p, r, set1(0.00836915645f));
    p = fma(p, r, set1(0.0416663528f));
    p = fma(p, r, set1(0.166665052f));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    vf e = (vf)((vu)p + ((vu)t << 23));
    return x < -87.0f ? vf{} : e;
}

// tanh: an odd polynomial near 0 (fitted at Chebyshev nodes, error 4e-9), elsewhere by e^2x.
static INLINE vf vtanh(vf x) {
    vf a = vabs(x), u = x * x;
    vf p = set1(-0.00560768872f);
    p = fma(p, u, set1(0.0205449053f));
    p = fma(p, u, set1(-0.0537070676f));
    p = fma(p, u, set1(0.133309573f));
    p = fma(p, u, set1(-0.333332535f));
    vf near = fma(p * u, x, x);
    vf far = copysign(1.0f - 2.0f / (vexp(a + a) + 1.0f), x);
    return a < 0.6f ? near : far;
}

// erfc(x) = t e^(-x^2 + P(t)) with t = 1 / (1 + x / 2) for x >= 0, 2 - erfc(-x) below. P is the degree 9 fit of
// log(erfc(x) e^(x^2) / t) at Chebyshev nodes for x to 12, error 6e-8.
static INLINE vf verfc(vf x) {
    vf a = vabs(x), t = 1.0f / fma(a, set1(0.5f), set1(1.0f));
    vf p = set1(0.157751014f);
    p = fma(p, t, set1(-0.750181579f));
    p = fma(p, t, set1(1.31865295f));
    p = fma(p, t, set1(-0.909740676f));
    p = fma(p, t, set1(0.0943214298f));
    p = fma(p, t, set1(-0.0902556599f));
    p = fma(p, t, set1(0.0652326512f));
    p = fma(p, t, set1(0.380354122f));
    p = fma(p, t, set1(0.999348078f));
    p = fma(p, t, set1(-1.26548227f));
    vf e = t * vexp(fma(-a, a, p));
    return x < 0.0f ? 2.0f - e : e;
}
