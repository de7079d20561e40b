// Quantized GEMMs in integer arithmetic, the packing of codes, and embedding look-ups in packed codes.
//
// Activations are rounded to int8 with a scale for each BLOCK columns. A matrix [n, k] is stored in panels of PANEL rows; in a
// panel, blocks of BLOCK columns follow each other:
//    8 bits  [8 quads of columns][PANEL][4 columns], codes + BIAS
//    4 bits  [4 pairs of quads][PANEL][4]: the first quad's codes in the low half of a byte, the second's in the high half
//    6 bits  [2 fours of quads][3][PANEL][4]: the codes of a four's first three quads, each with 2 bits of the fourth's above it
// Scales are in a separate array, by panels: see Scales. The sum over a block is exact in int32; blocks are added in float32
// in the order of k, so that the bits of an output depend on its row and column alone.
#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <type_traits>
#include <vector>

#include "coded.h"
#include "dtypes.h"
#include "pool.h"

namespace {

constexpr int PANEL = 16, BLOCK = 32, QUADS = BLOCK / 4;
constexpr int64_t PASS = 256;   // rows at a time
constexpr int64_t TASK = 262144; // bytes of codes that a task takes at least, where there are enough of them

#if defined(__AVX512F__)
constexpr int BIAS = 128, TALLEST = 8;
// Four bytes in every lane. From memory in one instruction: GCC goes through a general register otherwise.
static INLINE __m512i quads(const int8_t* from) {
    __m512i v;
    asm("vpbroadcastd %1, %0" : "=v"(v) : "m"(*(const int32_t*)from));
    return v;
}
#else
constexpr int BIAS = 0, TALLEST = 4;
#endif

// acc + the products of N quads of bytes, w, and N of signed bytes, x, in each lane. The bytes of w are unsigned, except codes of
// 8 bits without BIAS.
template <int BITS, int N>
static INLINE vi dots(vi acc, const vi* w, const int8_t* x) {
#if defined(__AVX512F__)
    __m512i sums[2] = {(__m512i)acc};
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[j % 2] = _mm512_dpbusd_epi32(sums[j % 2], (__m512i)w[j], quads(x + 4 * j));
    acc = (vi)sums[0] + (vi)sums[1];
#elif defined(__AVX2__)
    // As many products of a lane's half as 16 bits hold are added before they are widened: 16 of codes below 16, 4 below 64.
    constexpr int HELD = BITS == 4 ? N : BITS == 6 ? 2 : 1;
#pragma GCC unroll 8
    for (int j = 0; j < N; j += HELD) {
        __m256i held = __m256i{};
#pragma GCC unroll 8
        for (int i = j; i < j + HELD; i++) {
            __m256i a = (__m256i)w[i], b = _mm256_broadcastd_epi32(_mm_loadu_si32(x + 4 * i));
            if (BITS == 8) {
                b = _mm256_sign_epi8(b, a);
                a = _mm256_abs_epi8(a);
            }
            held = _mm256_add_epi16(held, _mm256_maddubs_epi16(a, b));
        }
        acc += (vi)_mm256_madd_epi16(held, _mm256_set1_epi16(1));
    }
#else
    for (int i = 0; i < 4 * N; i++) {
        vi a = BITS == 8 ? (w[i / 4] << (24 - i % 4 * 8)) >> 24 : (w[i / 4] >> i % 4 * 8) & 255;
        acc += a * (int32_t)x[i];
    }
#endif
    return acc;
}

static INLINE vf as_floats(vi v) { return __builtin_convertvector(v, vf); }
static INLINE vi every(int32_t x) { return x - vi{}; }

template <int BITS>
constexpr int64_t block_bytes = PANEL * BLOCK * BITS / 8;

// The codes of VW rows of a panel, from row `first` on, a vector for each quad of columns.
template <int BITS>
static INLINE void expand(const uint8_t* codes, int first, vi* w) {
    codes += first * 4;
    constexpr int LINE = PANEL * 4;
    if constexpr (BITS == 8) {
#pragma GCC unroll 8
        for (int j = 0; j < QUADS; j++) w[j] = unaligned<vi>(codes + j * LINE);
        return;
    }
    if constexpr (BITS == 6) {
#pragma GCC unroll 2
        for (int j = 0; j < QUADS; j += 4) {
            const vi a = unaligned<vi>(codes + j / 4 * 3 * LINE), b = unaligned<vi>(codes + (j / 4 * 3 + 1) * LINE);
            const vi c = unaligned<vi>(codes + (j / 4 * 3 + 2) * LINE), low = every(0x3f3f3f3f);
            w[j] = a & low, w[j + 1] = b & low, w[j + 2] = c & low;
            w[j + 3] = (a >> 2 & 0x30303030) | (b >> 4 & 0x0c0c0c0c) | (c >> 6 & 0x03030303);
        }
        return;
    }
    const vi low = every(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int j = 0; j < QUADS; j += 2) {
        vi both = unaligned<vi>(codes + j / 2 * LINE);
        w[j] = both & low;
        w[j + 1] = both >> 4 & low;
    }
}

// The scales of a panel. Kinds, with the bytes that a group of columns takes in a panel:
//    F32   [PANEL] float scales                      F32S  and [PANEL] float shifts: value = code * scale + shift
//    F16   [PANEL] half scales                       F16S  and [PANEL] half shifts
//    K45   256 columns: half d [PANEL], half dmin [PANEL], then for each block uint8 scale [PANEL], uint8 min [PANEL]
//    K6    256 columns: half d [PANEL], then for each half block int8 scale [PANEL]
enum Kind : int64_t { KIND_F32, KIND_F32S, KIND_F16, KIND_F16S, KIND_K45, KIND_K6, KIND_FP8 };
constexpr int64_t SUPER = 8;  // blocks of a k-quant's superblock

static inline int64_t scale_bytes(int64_t kind) {
    constexpr int64_t sizes[] = {4, 8, 2, 4, 4 + 2 * SUPER, 2 + 2 * SUPER};
    return PANEL * sizes[kind];
}

template <int64_t KIND>
struct Scales {
    static constexpr bool SHIFTS = KIND == KIND_F32S || KIND == KIND_F16S || KIND == KIND_K45, HALVES = KIND == KIND_K6;
    static constexpr bool SUPERS = KIND == KIND_K45 || KIND == KIND_K6;
    // Of the current block, of k-quants without d and dmin. K6: scale is that of the first half, shift of the second.
    vf scale, shift;
    // Group `group` of a panel's scales, block `b` of it, rows from `first` on.
    INLINE void read(const uint8_t* at, int64_t b, int first) {
        if constexpr (SUPERS) {
            const int8_t* small = (const int8_t*)at + PANEL * ((HALVES ? 2 : 4) + 2 * b);  // K45: at most 63
            scale = as_floats(load_bytes(small + first));
            shift = as_floats(load_bytes(small + PANEL + first));
        } else {
            using Unit = std::conditional_t<KIND == KIND_F32 || KIND == KIND_F32S, float, f16>;
            scale = load((const Unit*)at + first);
            if constexpr (SHIFTS) shift = load((const Unit*)at + PANEL + first);
        }
    }
};

// A row's products with VW rows of a panel. A superblock's are added before they are multiplied by its d and dmin.
template <int64_t KIND>
struct Sum {
    vf total = {}, part = {}, shifts = {};
    // a: the sums of a block of codes; of K6 those of its first half, c those of the second. d, moved: x's scale and that times
    // the sum of its codes.
    INLINE void add(const Scales<KIND>& now, float d, float moved, vi a, vi c = vi{}) {
        vf &sum = Scales<KIND>::SUPERS ? part : total, &rest = Scales<KIND>::SUPERS ? shifts : total;
        const vf first = as_floats(a) * (Scales<KIND>::HALVES ? now.scale : set1(d));
        sum = Scales<KIND>::HALVES ? fma(fma(as_floats(c), now.shift, first), set1(d), sum) : fma(first, now.scale, sum);
        if constexpr (Scales<KIND>::SHIFTS) rest = fma(set1(moved), now.shift, rest);
    }
    // Ends a superblock, whose scales are at `at`.
    INLINE void close(const uint8_t* at, int first) {
        total = fma(part, load((const f16*)at + first), total), part = vf{};
        if constexpr (KIND == KIND_K45) total = fma(-shifts, load((const f16*)at + PANEL + first), total), shifts = vf{};
    }
};

// Rows of x rounded to int8: codes [rows][k], and for each block a scale, that times the sum of its codes, and -offset times the
// sum of its codes, by which products of codes begin (K6: of each half of them).
struct Rows {
    int8_t* codes;
    float *scales, *moved;
    int32_t* begins;  // [rows][blocks][2]
    int64_t k, blocks;
};
constexpr int64_t ROW_BLOCK = 16;  // bytes of a block of a row beside its codes

// out [M][PANEL] = rows [first, first + M) of x times a panel of the matrix.
template <int BITS, int64_t KIND, int M>
void tile(const Rows& x, int64_t row, const Matrix& m, int64_t panel, float* out) {
    const int64_t blocks = x.blocks, stride = scale_bytes(KIND), group = Scales<KIND>::SUPERS ? SUPER : m.group;
    // One row takes all of a panel at once: in a second pass, over a panel in the cache, nothing would come from memory.
    constexpr int WIDE = M == 1 ? PANEL / VW : 1;
    for (int begin = 0; begin < PANEL; begin += WIDE * VW) {
        const uint8_t* codes = m.codes + panel * blocks * block_bytes<BITS>;
        const uint8_t* scales = m.scales + panel * ((blocks + m.group - 1) / m.group) * stride;
        const int8_t* xs = x.codes + row * x.k;
        const float *dx = x.scales + row * blocks, *moved = x.moved + row * blocks;
        const int32_t* begins = x.begins + row * blocks * 2;
        Sum<KIND> sums[WIDE][M];
        Scales<KIND> now;
        for (int64_t b = 0, in_group = 0; b < blocks; b++, codes += block_bytes<BITS>, xs += BLOCK, dx++, moved++, begins += 2) {
            for (size_t i = 0; i < block_bytes<BITS>; i += 64) __builtin_prefetch(codes + 4096 + i, 0, 2);
            __builtin_prefetch(scales + 1024, 0, 2);
#pragma GCC unroll 4
            for (int part = 0; part < WIDE; part++) {
                const int first = begin + part * VW;
                vi w[QUADS];
                now.read(scales, in_group, first);
                expand<BITS>(codes, first, w);
#pragma GCC unroll 8
                for (int r = 0; r < M; r++) {
                    const int8_t* quad = xs + r * x.k;
                    const int32_t* from = begins + r * blocks * 2;
                    constexpr int N = Scales<KIND>::HALVES ? QUADS / 2 : QUADS;
                    const vi a = dots<BITS, N>(KIND == KIND_K45 ? vi{} : every(from[0]), w, quad);  // K45 has no offset
                    const vi c = N < QUADS ? dots<BITS, N>(every(from[1]), w + QUADS / 2, quad + BLOCK / 2) : vi{};
                    sums[part][r].add(now, dx[r * blocks], moved[r * blocks], a, c);
                }
            }
            if (++in_group < group) continue;
            if constexpr (Scales<KIND>::SUPERS)
                for (int part = 0; part < WIDE; part++)
                    for (int r = 0; r < M; r++) sums[part][r].close(scales, begin + part * VW);
            in_group = 0, scales += stride;
        }
        for (int part = 0; part < WIDE; part++)
            for (int r = 0; r < M; r++) store(out + r * PANEL + begin + part * VW, sums[part][r].total);
    }
}

using Tile = void (*)(const Rows&, int64_t, const Matrix&, int64_t, float*);

template <int BITS, int64_t KIND, int M>
Tile tile_of(int rows) {
    if constexpr (M > 1)
        return rows == M ? &tile<BITS, KIND, M> : tile_of<BITS, KIND, M - 1>(rows);
    else
        return &tile<BITS, KIND, 1>;
}

Tile find(int64_t bits, int64_t kind, int rows) {
#define CASE(B, K) \
    if (bits == B && kind == K) return tile_of<B, K, TALLEST>(rows);
    CASE(8, KIND_F32) CASE(8, KIND_F32S) CASE(8, KIND_F16) CASE(4, KIND_F32) CASE(4, KIND_F32S) CASE(4, KIND_F16)
    CASE(4, KIND_F16S) CASE(4, KIND_K45) CASE(6, KIND_K45) CASE(6, KIND_K6)
#undef CASE
    return nullptr;
}

#if defined(__AMX_INT8__)
// Many rows by tiles of bytes (AMX): 16 rows of x and a panel, expanded to a byte a code, give the sums of a block. Everything
// behind the sums is as in `tile`, so that the bits are equal. Sums of half blocks (Q6_K) would take two tiles each: slower.
constexpr int64_t HEIGHT = 16, FEWEST = 64;
thread_local const uint8_t* expanded;  // the codes of this thread's panel

// Whether the system lets this process use tiles (Linux, Documentation/arch/x86/xstate.rst).
bool allowed(int64_t kind) {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    static const bool found = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    return found && kind != KIND_K6;
}

// Begins a panel: its codes, a byte each. A thread's tiles are 0 sums [16 rows][PANEL] int32, 1 codes of x [16][32], 2 those of
// the panel [8 quads][PANEL][4], 3 as many times -offset, by which the sums begin. Other libraries configure tiles too, so it is
// done for each panel.
template <int BITS>
void widen(const Matrix& m, int64_t panel, int64_t blocks) {
    alignas(64) uint8_t config[64] = {1}, less[QUADS * 64];
    const uint8_t bytes[] = {64, BLOCK, 64, 64}, heights[] = {HEIGHT, HEIGHT, QUADS, QUADS};
    for (int i = 0; i < 4; i++) config[16 + 2 * i] = bytes[i], config[48 + i] = heights[i];
    memset(less, (int)-m.offset, sizeof less);
    const uint8_t* codes = m.codes + panel * blocks * block_bytes<BITS>;
    uint8_t* wide = BITS == 8 ? (uint8_t*)codes : (uint8_t*)pool::scratch(1, blocks * block_bytes<8>);
    for (int64_t b = 0; BITS < 8 && b < blocks; b++)
        expand<BITS>(codes + b * block_bytes<BITS>, 0, (vi*)(wide + b * block_bytes<8>));
    asm volatile("" : : "r"(config), "r"(less), "r"(wide) : "memory");  // GCC's tile instructions do not say what they read
    _tile_loadconfig(config);
    _tile_loadd(3, less, 64);
    expanded = wide;
}

void begin(const Matrix& m, int64_t panel, int64_t blocks, int64_t bits) {
    (bits == 8 ? widen<8> : bits == 4 ? widen<4> : widen<6>)(m, panel, blocks);
}

template <int64_t KIND>
void high(const Rows& x, int64_t row, const Matrix& m, int64_t panel, float* out) {
    alignas(64) vi sums[HEIGHT];
    const uint8_t* codes = expanded;
    const uint8_t* scales = m.scales + panel * ((x.blocks + m.group - 1) / m.group) * scale_bytes(KIND);
    Sum<KIND> total[HEIGHT];
    Scales<KIND> now;
    for (int64_t b = 0, in_group = 0; b < x.blocks; b++, codes += block_bytes<8>) {
        now.read(scales, in_group, 0);
        _tile_loadd(1, x.codes + row * x.k + b * BLOCK, x.k);
        _tile_loadd(2, codes, 64);
        _tile_zero(0);
        _tile_dpbssd(0, 1, 3);
        _tile_dpbsud(0, 1, 2);
        _tile_stored(0, sums, 64);
#pragma GCC unroll 16
        for (int r = 0; r < HEIGHT; r++) {
            const int64_t at = (row + r) * x.blocks + b;
            total[r].add(now, x.scales[at], x.moved[at], sums[r]);
        }
        if (++in_group < m.group) continue;
        for (int r = 0; Scales<KIND>::SUPERS && r < HEIGHT; r++) total[r].close(scales, 0);
        in_group = 0, scales += scale_bytes(KIND);
    }
    for (int r = 0; r < HEIGHT; r++) store(out + r * PANEL, total[r].total);
}

Tile highest(int64_t kind) {
    constexpr Tile kinds[] = {high<KIND_F32>, high<KIND_F32S>, high<KIND_F16>, high<KIND_F16S>, high<KIND_K45>};
    return kinds[kind];
}
#else
constexpr int64_t HEIGHT = 0, FEWEST = 0;
bool allowed(int64_t) { return false; }
void begin(const Matrix&, int64_t, int64_t, int64_t) {}
Tile highest(int64_t) { return nullptr; }
#endif

// x [rows, k] to int8. `fixed`: null, or the scale of all (fixed[0] > 0), or a scale for each row (fixed[0] == 0).
template <class T>
void round_rows(const T* x, int64_t rows, const CodedCall& call, const Rows& out) {
    const int64_t k = call.matrix.k, offset = call.matrix.offset;
    const float* fixed = call.fixed;
    pool::parallel_if(rows * k > 65536, rows, [&](int64_t r) {
        const T* from = x + r * call.ldx;
        float whole = fixed ? fixed[0] : 0;
        if (fixed && !(whole > 0)) {
            vf peak = {};
            for (int64_t i = 0; i < k; i += VW) peak = vmax(peak, vabs(load_upto(from + i, k - i)));
            whole = hmax(peak) / 127;
        }
        for (int64_t b = 0; b < out.blocks; b++) {
            vf v[BLOCK / VW], peak = {};
            for (int i = 0; i < BLOCK / VW; i++) {
                const int64_t left = k - b * BLOCK - i * VW;
                v[i] = left > 0 ? load_upto(from + b * BLOCK + i * VW, left) : vf{};
                peak = vmax(peak, vabs(v[i]));
            }
            const float d = fixed ? whole : hmax(peak) / 127;
            const float inverse = d > 0 ? 1.0f / d : 0;
            int8_t* to = out.codes + r * out.k + b * BLOCK;
            int32_t sums[2] = {};
            for (int i = 0; i < BLOCK / VW; i++) {
                vf scaled = fixed ? v[i] / set1(d > 0 ? d : 1.0f) : v[i] * inverse;
                scaled = scaled > 127.0f ? set1(127.0f) : scaled < -127.0f ? set1(-127.0f) : scaled;
                // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, which is then in the low bits.
                vi code = (vi)(scaled + 12582912.0f) - 0x4b400000;
                typedef int8_t vc __attribute__((vector_size(VW)));
                vc narrow = __builtin_convertvector(code, vc);
                memcpy(to + i * VW, &narrow, sizeof narrow);
                sums[i * VW / (BLOCK / 2)] += (int32_t)hsum(as_floats(code));
            }
            const int64_t at = r * out.blocks + b;
            out.scales[at] = d;
            out.moved[at] = d * (float)(sums[0] + sums[1]);
            out.begins[2 * at] = (int32_t)-offset * (sums[0] + (call.kind == KIND_K6 ? 0 : sums[1]));
            out.begins[2 * at + 1] = (int32_t)-offset * sums[1];
        }
    });
}

// Products of matrices of one shape, up to PASS rows at a time, as one job of the pool. A task is some panels of a matrix times
// its rows of a pass; adds bias and stores.
template <class T, class Out>
void product(const CodedCall* calls, int64_t number) {
    const int64_t n = calls->matrix.n, k = calls->matrix.k, bits = calls->bits, kind = calls->kind;
    const int64_t blocks = (k + BLOCK - 1) / BLOCK, panels = (n + PANEL - 1) / PANEL;
    const int64_t padded = blocks * BLOCK, panel_bytes = panels ? padded * PANEL * bits / 8 : 1;
    const int64_t group = std::max<int64_t>(1, std::min(TASK / panel_bytes, panels / (4 * pool::threads())));
    const int64_t tasks = (panels + group - 1) / group;
    struct Part {
        const CodedCall* call;
        int64_t at, count;
        Rows packed;
    };
    std::vector<Part> parts;
    int64_t rows = 0;
    for (int64_t i = 0; i < number; i++) rows = std::min(PASS, rows + calls[i].rows);
    char* memory = (char*)pool::scratch(0, rows * (padded + blocks * ROW_BLOCK) + HEIGHT * padded + 64);
    rows = 0;
    auto run = [&] {
        pool::parallel_if(rows * n * k > 400000, tasks * (int64_t)parts.size(), [&](int64_t place) {
            const auto& [call, at, count, packed] = parts[place / tasks];
            const Matrix& m = call->matrix;
            const bool many = count >= FEWEST && allowed(kind);
            const int64_t task = place % tasks, tiles = (count + TALLEST - 1) / TALLEST;
            const int64_t taller = many ? count : count % tiles, height = many ? HEIGHT - 1 : count / tiles;
            const Tile tall = many ? highest(kind) : find(bits, kind, (int)std::min<int64_t>(TALLEST, height + 1));
            const Tile low = many ? tall : find(bits, kind, (int)height);
            alignas(64) float sums[std::max<int64_t>(HEIGHT, TALLEST) * PANEL];
            for (int64_t p = task * group; p < std::min(panels, (task + 1) * group); p++) {
                if (many) begin(m, p, blocks, bits);
                for (int64_t t = 0, row = 0, here; row < count; t++, row += here) {
                    here = std::min(height + (t < taller), count - row);
                    (t < taller ? tall : low)(packed, row, m, p, sums);
                    for (int64_t r = 0; r < here; r++)
                        for (int i = 0; i < PANEL; i += VW) {
                            const int64_t column = p * PANEL + i, left = n - column;
                            if (left <= 0) break;
                            vf y = load(sums + r * PANEL + i);
                            if (m.gains) y *= load_upto(m.gains + column, left);
                            if (call->bias) y += load_upto((const T*)call->bias + column, left);
                            store_upto((Out*)call->out + (at + row + r) * n + column, y, left);
                        }
                }
            }
        });
        parts.clear();
        rows = 0;
    };
    for (const CodedCall* c = calls; c < calls + number; c++)
        for (int64_t at = 0, count; at < c->rows; at += count) {
            count = std::min(PASS - rows, c->rows - at);
            char* own = memory + rows * (padded + blocks * ROW_BLOCK);
            const Rows packed{(int8_t*)(own + count * blocks * ROW_BLOCK), (float*)own, (float*)own + count * blocks,
                              (int32_t*)own + 2 * count * blocks, padded, blocks};
            round_rows((const T*)c->x + at * c->ldx, count, *c, packed);
            parts.push_back({c, at, count, packed});
            if ((rows += count) == PASS) run();
        }
    if (rows) run();
}

// The order of the 32 codes of a block of columns in a row: a byte each; as pairs, the first low; the first half low
// and the second high, for a block, or for two blocks in a row of a superblock of 256; the same with a fifth bit in the 32 bytes
// before; as Q6_K has them.
enum Form { BYTES, PAIRS, HALVES, CHUNKS, FIVES, SIXES };
struct Source {
    const uint8_t* rows;
    int64_t row_bytes, block_bytes, offset, form;  // block_bytes: of 32 columns, from CHUNKS on of 256
};

constexpr uint32_t LOW = 0x0F0F0F0F;

// The codes of block b of a row, a byte each, zeros beyond column k.
void read_block(const Source& s, int64_t row, int64_t b, int64_t k, uint32_t* word) {
    const int64_t left = std::min<int64_t>(BLOCK, k - b * BLOCK);
    const uint8_t* at = s.rows + row * s.row_bytes + s.offset + (s.form >= CHUNKS ? b / 8 : b) * s.block_bytes;
    uint8_t bytes[BLOCK] = {};
    if (s.form >= FIVES) {  // of six bits, the low 4 of a half's four blocks are in 64 bytes, the high 2 of both halves in 64 behind
        const bool six = s.form == SIXES;
        const int64_t half = b % 8 / 4;
        memcpy(word, six ? at + half * 64 + b % 2 * BLOCK : at + b % 8 / 2 * BLOCK, BLOCK);
        memcpy(bytes, six ? at + 128 + half * BLOCK : at - BLOCK, BLOCK);
        for (int i = 0; i < 8; i++) {
            uint32_t high = unaligned<uint32_t>(bytes + 4 * i);
            high = six ? high >> b % 4 * 2 & 0x03030303 : high >> b % 8 & 0x01010101;
            word[i] = (word[i] >> (six ? b % 4 / 2 : b % 2) * 4 & LOW) | high << 4;
        }
        return;
    }
    if (s.form == BYTES) {
        memcpy(word, memcpy(bytes, at, left), BLOCK);
    } else if (s.form == PAIRS) {
        memcpy(bytes, at, (left + 1) / 2);
        for (int q = 0; q < 8; q++) {
            const uint32_t two = bytes[2 * q] | (uint32_t)bytes[2 * q + 1] << 16;
            word[q] = (two | two << 4) & LOW;
        }
    } else {
        memcpy(word, s.form == HALVES ? at : at + b % 8 / 2 * BLOCK, s.form == HALVES ? BLOCK / 2 : BLOCK);
        for (int q = 7; q >= 0; q--)
            word[q] = (s.form == HALVES ? word[q % 4] >> q / 4 * 4 : word[q] >> b % 2 * 4) & LOW;
    }
}

}  // namespace

// The codes of a matrix [n, k] (8 bits: the bits of the signed number) to panels. Returns what is added to codes.
EXPORT int64_t penstock_coded_pack(const uint8_t* rows, int64_t row_bytes, int64_t block_bytes, int64_t offset, int64_t form,
                                int64_t n, int64_t k, int64_t bits, uint8_t* to) {
    const Source source{rows, row_bytes, block_bytes, offset, form};
    const int64_t blocks = (k + BLOCK - 1) / BLOCK, block_size = PANEL * BLOCK * bits / 8;
    const uint32_t flip = bits == 8 && BIAS ? 0x80808080u : 0;
    pool::advise_huge(to, (n + PANEL - 1) / PANEL * blocks * block_size);
    pool::parallel_if(n * k > 65536, (n + PANEL - 1) / PANEL, [&](int64_t p) {
        for (int64_t lane = 0; lane < PANEL; lane++)
            for (int64_t b = 0; b < blocks; b++) {
                uint32_t word[8] = {}, *line = (uint32_t*)(to + (p * blocks + b) * block_size) + lane;
                if (p * PANEL + lane < n) read_block(source, p * PANEL + lane, b, k, word);
                for (int q = 0; bits == 8 && q < 8; q++) line[q * PANEL] = word[q] ^ flip;
                for (int q = 0; bits == 4 && q < 4; q++) line[q * PANEL] = (word[2 * q] & LOW) | (word[2 * q + 1] & LOW) << 4;
                for (int q = 0; bits == 6 && q < 6; q++)
                    line[q * PANEL] = word[q / 3 * 4 + q % 3] | (word[q / 3 * 4 + 3] >> (4 - q % 3 * 2) & 0x03030303) << 6;
            }
    });
    return bits == 8 ? BIAS : 0;
}

// Codes of 4 bits in AWQ's words, [k][wide], of which each has a column of eight rows, as rows [8 * wide] of pairs, the first low.
// k is a multiple of 8 * VW, wide of VW.
EXPORT void penstock_coded_turn(const uint32_t* words, int64_t k, int64_t wide, uint8_t* to) {
    pool::parallel_if(k * wide > 8192, wide / VW, [&](int64_t tile) {
        for (int64_t first = 0; first < k; first += 8 * VW) {
            vu from[8 * VW], line[VW];
            for (int c = 0; c < 8 * VW; c++) memcpy(&from[c], words + (first + c) * wide + tile * VW, sizeof(vu));
            for (int i = 0; i < 8; i++) {
                for (int q = 0; q < VW; q++) {
                    line[q] = vu{};
                    for (int c = 0; c < 8; c++) line[q] |= (from[8 * q + c] >> (4 * (i / 2 + i % 2 * 4)) & 15u) << 4 * c;
                }
                transpose(line);
                for (int lane = 0; lane < VW; lane++)
                    memcpy(to + ((tile * VW + lane) * 8 + i) * (k / 2) + first / 2, &line[lane], sizeof(vu));
            }
        }
    });
}

EXPORT void penstock_coded(const CodedCall* calls, int64_t number) {
    if (calls->kind == KIND_FP8) {
        for (int64_t i = 0; i < number; i++) fp8_product(calls[i]);
        return;
    }
    by_dtype(calls->dtype & 255, [&]<class T>(T) {
        calls->dtype & 256 ? product<T, float>(calls, number) : product<T, T>(calls, number);
    });
}
