// GEMMs of activations with a packed weight matrix, the packing, and embedding look-ups in packed weights.
//
// A weight [N, K] is stored as panels of NR output columns: [N / NR][K][NR], with bf16 in pairs of k, [N / NR][K / 2][NR][2],
// so that both elements of a 32-bit lane widen to f32 by one shift or mask; missing columns and an odd last k are zero.
// Each output is one chain of fused multiply-adds over k, in order, in f32, independent of the number of rows, so its bits
// depend on its own row and column only (batch invariance). Rows and columns are blocked for registers and caches; between
// blocks of k, partial sums are kept in f32. (vdpbf16ps has half the multiply-add rate of f32 FMA on Sapphire Rapids.)

#include <algorithm>
#include <type_traits>

#include "codec.h"
#include "coded.h"
#include "pool.h"

namespace {

constexpr int NR = 32;       // columns of a panel
constexpr int NV = NR / VW;  // vectors of a panel

// Register tile: accumulators of max_rows rows by strip_vectors vectors.
#if defined(__AVX512F__)
template <class T>
constexpr int max_rows = 12;
constexpr int strip_vectors(int) { return 2; }
#elif defined(__AVX2__)
template <class T>
constexpr int max_rows = std::is_same_v<T, bf16> ? 5 : 6;  // GCC 12 spills at 6 rows of bf16: 68 instead of 84 GFLOP/s per core
constexpr int strip_vectors(int rows) { return rows <= 3 ? 4 : 2; }
#else
template <class T>
constexpr int max_rows = 4;
constexpr int strip_vectors(int) { return 2; }
#endif

constexpr int64_t SLICE = 16384;  // bytes of a panel that stay in L1 while all row blocks of a task use them
constexpr int64_t ROWS = 256;     // rows per task: their partial sums and slices of x stay in L2
constexpr int64_t PASS = 512;     // rows per pass: more are several passes
constexpr int64_t GROUP = 4;      // panels per task: a slice of x comes into L2 once for all of them
constexpr int64_t AHEAD = 4096;   // prefetch distance within a stream, in bytes

// Layout and widening of an element type: STEP consecutive k are stored together.
template <class T>
struct Format {
    static constexpr int STEP = 1;
    static INLINE vf read(const T* w, int vector, int) { return load(w + vector * VW); }
};
template <>
struct Format<bf16> {
    static constexpr int STEP = 2;
    static INLINE vf read(const bf16* w, int vector, int k) {
        const vu pair = unaligned<vu>(w + vector * VW * 2);
        return (vf)(k == 0 ? pair << 16 : pair & 0xffff0000u);
    }
};

// FP8 (E4M3): the bits in place are a number's 2^-120 part, subnormals included; NaN is read as 480.
template <>
struct Format<code> {
    static constexpr int STEP = 1;
    static INLINE vf read(const code* w, int vector, int) {
        return (vf)((load_bytes((const int8_t*)w + vector * VW) << 20) & (int32_t)0x87f00000);
    }
};
constexpr float UP = 0x1p64f;    // of FP8's activations, so that products are no subnormals
constexpr float DOWN = 0x1p56f;  // makes up for both
constexpr int64_t CHUNK = 128;   // columns of FP8's weights and activations that share scales

template <class T>
int64_t padded(int64_t k) {
    constexpr int64_t step = Format<T>::STEP;
    return (k + step - 1) / step * step;
}

// Prefetch into L2 during a pass: one or two cache lines per STEP, `stride` bytes further each time.
struct Ahead {
    const char* at;
    int64_t stride;
};

// c [M][NR] (+)= x [kc][M] times w [kc][NR]; `first` starts the sums at zero. gains: of FP8, a scale for each column of the slice.
template <class T, int M>
void block(const float* x, const T* w, float* c, int64_t kc, bool first, Ahead ahead, const float* gains) {
    constexpr bool CODES = std::is_same_v<T, code>;
    constexpr int S = strip_vectors(M), STEP = Format<T>::STEP;
    for (int j = 0; j < NV; j += S) {
        vf acc[M][S];
        for (int r = 0; r < M; r++)
            for (int v = 0; v < S; v++) acc[r][v] = first || CODES ? vf{} : load(c + r * NR + (j + v) * VW);
        const float* xs = x;
        const T* ws = w + j * VW * STEP;
        for (int64_t k = 0; k < kc; k += STEP) {
            for (size_t b = 0; b < S * VW * STEP * sizeof(T); b += 64) __builtin_prefetch(ahead.at + b, 0, 2);
            ahead.at += ahead.stride;
#pragma GCC unroll 2
            for (int s = 0; s < STEP; s++) {
                vf column[S];
                for (int v = 0; v < S; v++) column[v] = Format<T>::read(ws, v, s);
#pragma GCC unroll 16
                for (int r = 0; r < M; r++) {
                    vf row = set1(xs[s * M + r]);
                    for (int v = 0; v < S; v++) acc[r][v] = fma(row, column[v], acc[r][v]);
                }
            }
            xs += STEP * M;
            ws += STEP * NR;
        }
        for (int r = 0; r < M; r++)
            for (int v = 0; v < S; v++) {
                float* to = c + r * NR + (j + v) * VW;
                if constexpr (CODES) acc[r][v] = fma(acc[r][v], load(gains + (j + v) * VW) * DOWN, first ? vf{} : load(to));
                store(to, acc[r][v]);
            }
    }
}

template <class T>
using Block = void (*)(const float*, const T*, float*, int64_t, bool, Ahead, const float*);

template <class T, int M>
Block<T> block_of(int rows) {
    if constexpr (M > 1)
        return rows == M ? &block<T, M> : block_of<T, M - 1>(rows);
    else
        return &block<T, 1>;
}

// T rows cut into blocks of nearly equal height, at most `most`.
struct RowBlocks {
    int64_t count, height, taller;
    RowBlocks(int64_t rows, int64_t most) : count((rows + most - 1) / most), height(rows / count), taller(rows % count) {}
    int64_t begin(int64_t b) const { return b * height + std::min(b, taller); }
    int64_t rows(int64_t b) const { return height + (b < taller); }
};

// Rows of x, at most VW, as f32, k-major: [k][rows], k padded with zeros.
template <class T>
void pack_rows(const T* x, int64_t ldx, int64_t rows, int64_t k, int64_t padded_k, float* out) {
    if (rows == 1) {
        int64_t i = 0;
        for (; i + VW <= k; i += VW) store(out + i, load(x + i));
        if (i < padded_k) store_upto(out + i, load_first(x + i, k - i), padded_k - i);
        return;
    }
    for (int64_t i = 0; i < padded_k; i += VW) {
        vf column[VW];
#pragma GCC unroll 16
        for (int64_t r = 0; r < VW; r++) column[r] = r < rows ? load_upto(x + r * ldx + i, k - i) : vf{};
        transpose(column);
        // Each full store may overwrite the beginning of the next row, which is stored afterwards.
        for (int64_t lane = 0; lane < VW && i + lane < padded_k; lane++)
            if ((i + lane) * rows + VW <= padded_k * rows)
                store(out + (i + lane) * rows, column[lane]);
            else
                store_first(out + (i + lane) * rows, column[lane], rows);
    }
}

// Epilogue: adds the bias to the sums of `rows` rows of one panel, and stores them in out.
template <class Out, class T>
void finish(const float* c, const T* bias, Out* out, int64_t ldo, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) {
            int64_t left = columns - v * VW;
            if (left <= 0) break;
            vf sum = load(c + r * NR + v * VW);
            if (bias) sum += load_upto(bias + v * VW, left);
            store_upto(out + r * ldo + v * VW, sum, left);
        }
}

// One pass of at most PASS rows: its division into tasks, and a task.
template <class X, class T, class Bias, class Out>
struct Pass {
    const X* x;
    const T* w;
    const Bias* bias;
    Out* out;
    const int64_t ldx, rows, n, k;
    const float* gains = nullptr;  // of FP8: by panels and chunks at these strides
    const int64_t panel_stride = 0, chunk_stride = 0;

    const int64_t pk = padded<T>(k), panels = (n + NR - 1) / NR;
    const RowBlocks blocks{rows, max_rows<T>};
    // With few rows the weights are streamed once over the whole of k; with more, slices of k are kept in L1.
    const bool flow = rows < 4 && blocks.count == 1 && strip_vectors((int)rows) == NV;
    const int64_t kc = std::is_same_v<T, code> ? CHUNK : flow ? pk : SLICE / (NR * (int64_t)sizeof(T));
    const int64_t task_blocks = (ROWS + max_rows<T> - 1) / max_rows<T>;  // so that PASS rows are two equal tasks
    const int64_t row_tasks = (blocks.count + task_blocks - 1) / task_blocks;
    const int64_t group = panels_of_a_task(), groups = (panels + group - 1) / group;
    // By slices of kc, then row blocks: what a task reads of a slice is one run of memory, whose lines lie in all sets of L2.
    float* const packed = (float*)pool::scratch(0, rows * pk * sizeof(float));

    int64_t panels_of_a_task() const {
        const int64_t bytes = NR * pk * (int64_t)sizeof(T);
        int64_t g = 1;
        while (g < GROUP && !flow && panels / (g * 2) * row_tasks >= 8 * pool::threads()) g *= 2;
        // A task should take at least some microseconds.
        while (g < panels && g * bytes < 32768 && g * NR * pk * rows < 131072) g *= 2;
        return g;
    }

    void run() const {
        pool::parallel_if(rows * k > 65536, blocks.count, [&](int64_t b) {
            const int64_t r = blocks.begin(b), m = blocks.rows(b);
            for (int64_t at = 0; at < pk; at += kc) {
                const int64_t length = std::min(kc, pk - at);
                pack_rows(x + r * ldx + at, ldx, m, std::min(length, k - at), length, packed + at * rows + r * length);
            }
        });
        const bool worth = rows * n * k > 200000 || n * k > 65536;
        pool::parallel_if(worth, groups * row_tasks, [&](int64_t i) { task(i / groups, i % groups); });
    }

    void task(int64_t row_task, int64_t panel_task) const {
        const int64_t first_block = row_task * task_blocks, last_block = std::min(blocks.count, first_block + task_blocks);
        const int64_t first_panel = panel_task * group, last_panel = std::min(panels, first_panel + group);
        const int64_t first_row = blocks.begin(first_block), height = blocks.begin(last_block) - first_row;
        float* sums = (float*)pool::scratch(1, group * height * NR * sizeof(float));
        for (int64_t at = 0; at < pk; at += kc) {
            const int64_t length = std::min(kc, pk - at);
            for (int64_t p = first_panel; p < last_panel; p++) {
                const T* here = w + (p * pk + at) * NR;
                // The next slice to prefetch; after the last one, that of the next task.
                const T* next = here + pk * NR;
                if (p + 1 == last_panel) next = w + (at + kc < pk ? first_panel * pk + at + kc : last_panel * pk) * NR;
                for (int64_t b = first_block; b < last_block; b++) {
                    const int64_t r = blocks.begin(b), m = blocks.rows(b);
                    block_of<T, max_rows<T>>((int)m)(packed + at * rows + r * length, here,
                                                     sums + ((p - first_panel) * height + r - first_row) * NR, length, at == 0,
                                                     ahead(here, next, b - first_block, last_block - first_block, m, length),
                                                     gains + p * panel_stride + at / CHUNK * chunk_stride);
                }
            }
        }
        for (int64_t p = first_panel; p < last_panel; p++)
            finish(sums + (p - first_panel) * height * NR, bias ? bias + p * NR : nullptr, out + first_row * n + p * NR, n,
                   height, n - p * NR);
    }

    // The prefetches of row block `number` of `passes` over the slice at `here`: the first two blocks share the next slice.
    Ahead ahead(const T* here, const T* next, int64_t number, int64_t passes, int64_t height, int64_t length) const {
        const int64_t step = NR * Format<T>::STEP * sizeof(T) / (NV / strip_vectors((int)height));
        if (flow) return {(const char*)here + AHEAD, step};
        if (passes == 1) return {(const char*)next, step};
        return {(const char*)next + number * length * NR * (int64_t)sizeof(T) / 2, number < 2 ? step / 2 : 0};
    }
};

template <class T, class Out>
void linear(const T* x, int64_t ldx, const T* w, const T* bias, Out* out, int64_t rows, int64_t n, int64_t k) {
    // Bounds the memory of the packed rows for prompts of any length.
    for (int64_t r = 0; r < rows; r += PASS)
        Pass<T, T, T, Out>{x + r * ldx, w, bias, out + r * n, ldx, std::min(PASS, rows - r), n, k}.run();
}

// v, at most 448, rounded to E4M3's numbers, to even.
INLINE vf to_e4m3(vf v) {
    const vu u = (vu)v;
    const vf normal = (vf)((u + 0x7ffffu + ((u >> 20) & 1u)) & 0xfff00000u), small = (v + 0x1.8p14f) - 0x1.8p14f;
    return vabs(v) < 0x1p-6f ? small : normal;
}

// A row of x, rounded as the call says, times UP.
template <class T>
void fp8_row(const T* x, const CodedCall& c, float* out) {
    const int64_t k = c.matrix.k, span = c.matrix.offset ? c.matrix.offset : k;
    for (int64_t at = 0; at < k; at += span) {
        const int64_t end = std::min(k, at + span);
        vf peak = {};
        for (int64_t i = at; i < end; i += VW) peak = vmax(peak, vabs(load_upto(x + i, end - i)));
        const float scale = c.fixed ? *c.fixed : std::max(hmax(peak), 1e-12f) / 448.0f;
        for (int64_t i = at; i < end; i += VW) {
            vf v = load_upto(x + i, end - i);
            if (c.matrix.offset) {
                v = v / set1(scale);
                v = to_e4m3(v > 448.0f ? set1(448.0f) : v < -448.0f ? set1(-448.0f) : v) * scale;
            }
            store_upto(out + i, v * UP, end - i);
        }
    }
}

template <class T, class Out>
void fp8(const CodedCall& c) {
    const Matrix& m = c.matrix;
    for (int64_t r = 0; r < c.rows; r += PASS) {
        const int64_t rows = std::min(PASS, c.rows - r);
        float* wide = (float*)pool::scratch(2, rows * m.k * sizeof(float));
        pool::parallel_if(rows * m.k > 65536, rows,
                          [&](int64_t i) { fp8_row((const T*)c.x + (r + i) * c.ldx, c, wide + i * m.k); });
        Pass<float, code, T, Out>{wide, (const code*)m.codes, (const T*)c.bias, (Out*)c.out + r * m.n, m.k, rows, m.n, m.k,
                                  (const float*)m.scales, m.group * NR, m.group > 1 ? NR : 0}.run();
    }
}

template <class T>
void pack(const T* from, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k, T* to) {
    constexpr int STEP = Format<T>::STEP;
    const int64_t pk = padded<T>(k), panels = (n + NR - 1) / NR;
    pool::parallel_if(n * k > 65536, panels, [&](int64_t p) {
        T* panel = to + p * pk * NR;
        const int64_t columns = std::min<int64_t>(NR, n - p * NR);
        if (columns < NR || pk > k) memset((void*)panel, 0, pk * NR * sizeof(T));
        constexpr int64_t TILE = 64;  // k at a time, so that the lines written stay in L1
        for (int64_t at = 0; at < k; at += TILE)
            for (int64_t c = 0; c < columns; c++) {
                const T* row = from + (p * NR + c) * row_stride;
                for (int64_t i = at; i < std::min(k, at + TILE); i++)
                    panel[(i / STEP * NR + c) * STEP + i % STEP] = row[i * column_stride];
            }
    });
}

template <class T>
void gather(const int64_t* ids, int64_t rows, const T* w, int64_t k, T* out) {
    constexpr int STEP = Format<T>::STEP;
    const int64_t pk = padded<T>(k);
    pool::parallel_if(rows * k > 16384, rows, [&](int64_t r) {
        const T* from = w + ids[r] / NR * pk * NR + ids[r] % NR * STEP;
        T* to = out + r * k;
        for (int64_t i = 0; i + STEP <= k; i += STEP) memcpy(to + i, from + i * NR, STEP * sizeof(T));
        if (pk > k) to[k - 1] = from[(k - 1) * NR];
    });
}

}  // namespace

// Elements (not bytes) that the packed form of [n, k] takes.
EXPORT int64_t penstock_packed_size(int64_t n, int64_t k, int64_t dtype) {
    return (n + NR - 1) / NR * NR * (dtype == BF16 ? padded<bf16>(k) : k);
}

EXPORT void penstock_pack(const void* from, void* to, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride,
                          int64_t dtype) {
    pool::advise_huge(to, penstock_packed_size(n, k, dtype) * (dtype == F32 ? 4 : dtype == FP8 ? 1 : 2));
    if (dtype == FP8) return pack((const code*)from, row_stride, column_stride, n, k, (code*)to);
    by_dtype(dtype, [&]<class T>(T) { pack((const T*)from, row_stride, column_stride, n, k, (T*)to); });
}

EXPORT void penstock_linear(const void* x, int64_t ldx, const void* w, const void* bias, void* out, int64_t rows, int64_t n,
                            int64_t k, int64_t dtype, int64_t out_f32) {
    if (rows == 0) return;
    by_dtype(dtype, [&]<class T>(T) {
        by_output<T>(out_f32, [&]<class O>(O) { linear((const T*)x, ldx, (const T*)w, (const T*)bias, (O*)out, rows, n, k); });
    });
}

void fp8_product(const CodedCall& c) {
    by_dtype(c.dtype & 255, [&]<class T>(T) { by_output<T>(c.dtype & 256, [&]<class O>(O) { fp8<T, O>(c); }); });
}

// Returns -1, or the place of the first id outside [0, n): nothing is read then.
EXPORT int64_t penstock_gather(const int64_t* ids, int64_t rows, const void* w, int64_t n, int64_t k, void* out,
                               int64_t dtype) {
    for (int64_t r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= n) return r;
    by_dtype(dtype, [&]<class T>(T) { gather(ids, rows, (const T*)w, k, (T*)out); });
    return -1;
}
