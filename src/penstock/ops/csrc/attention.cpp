// Attention of a ragged step over the paged cache.
//
// Keys are taken in blocks of BLOCK positions that begin at multiples of BLOCK, and blocks in parts of PART positions. A part is
// an online softmax over its blocks (Milakov and Gimelshein 2018), the parts are merged in order (as flash decoding does, Dao et
// al. 2023). These bounds are absolute, every sum runs in position order, and a masked key changes nothing, so a query's bits
// depend neither on its neighbours, nor on how the prompt was cut, nor on how many threads shared the parts.
//
// A tile is a run of one segment's queries with all heads that share a KV head: its rows reuse each block of keys, which is
// widened to f32 and transposed when loaded, so that scores are vectors over keys and any head size works.

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "codec.h"
#include "pool.h"

namespace {

constexpr int64_t BLOCK = 64, PART = 512, TILE_ROWS = 64;
constexpr float NONE = -std::numeric_limits<float>::infinity();
#if defined(__AVX512F__)
constexpr int MR = 6, NV = 4;
#elif defined(__AVX2__)
constexpr int MR = 6, NV = 2;
#else
constexpr int MR = 4, NV = 2;
#endif

struct Arguments {
    const void *q, *k, *v;
    // No table: a query sees all of its segment, whose keys and values are the step's own, as pages of one; no context then.
    const int32_t *table, *query_start, *context;
    void* out;
    int64_t q_token, q_head, k_page, k_head, k_slot, v_page, v_head, v_slot, table_row;
    int64_t segments, heads, kv_heads, size, value_size, page, window;
    const float *sinks, *slopes;  // a head's; null if there are none
    // Draft trees: the key from which on a segment's queries see their ancestors alone, and a query's ancestors; null if none.
    const int32_t* origins;
    const int64_t* bits;
    Coding key, value;            // of a cache of codes
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// c [M][ldc] (+)= a [M][lda] times b [k][ldb], for V vectors of columns; sums run over k in order.
template <int M, int V>
INLINE void product_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
                          bool add) {
    vf acc[M][V];
    for (int r = 0; r < M; r++)
        for (int v = 0; v < V; v++) acc[r][v] = add ? load(c + r * ldc + v * VW) : vf{};
    for (int64_t i = 0; i < k; i++) {
        vf column[V];
        for (int v = 0; v < V; v++) column[v] = load(b + i * ldb + v * VW);
#pragma GCC unroll 8
        for (int r = 0; r < M; r++) {
            vf row = set1(a[r * lda + i]);
            for (int v = 0; v < V; v++) acc[r][v] = fma(row, column[v], acc[r][v]);
        }
    }
    for (int r = 0; r < M; r++)
        for (int v = 0; v < V; v++) store(c + r * ldc + v * VW, acc[r][v]);
}

template <int M>
void product_rows(int64_t m, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t n,
                  int64_t k, bool add) {
    if constexpr (M > 1) {
        if (m < M) return product_rows<M - 1>(m, a, lda, b, ldb, c, ldc, n, k, add);
    }
    int64_t j = 0;
    for (; j + NV * VW <= n; j += NV * VW) product_block<M, NV>(a, lda, b + j, ldb, c + j, ldc, k, add);
    for (; j < n; j += VW) product_block<M, 1>(a, lda, b + j, ldb, c + j, ldc, k, add);
}

void product(int64_t m, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t n, int64_t k,
             bool add) {
    for (int64_t r = 0, left = (m + MR - 1) / MR; left; left--) {  // blocks of nearly equal height
        const int64_t height = (m - r + left - 1) / left;
        product_rows<MR>(height, a + r * lda, lda, b, ldb, c + r * ldc, ldc, n, k, add);
        r += height;
    }
}

// Keys [count], a multiple of VW, of elements [first, size), each at its own address or absent (null, read as zero), to f32
// [size][BLOCK]. Prefetches the entries at `next`: pages are not contiguous, so the hardware prefetcher cannot.
template <class T>
void load_keys(const T* const* keys, const T* const* next, int64_t count, int64_t first, int64_t size, float* out) {
    for (int64_t k = 0; k < count; k += VW)
        for (int64_t d = first; d < size; d += VW) {
            const int64_t left = std::min<int64_t>(VW, size - d);
            vf rows[VW];
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) {
                rows[i] = keys[k + i] ? load_upto(keys[k + i] + d, left) : vf{};
                __builtin_prefetch(next[k + i] + d, 0, 2);
            }
            transpose(rows);
            for (int i = 0; i < left; i++) store(out + (d + i) * BLOCK + k, rows[i]);
        }
}

// bf16 is transposed in pairs and widened afterwards, which halves the shuffles.
void load_key_pairs(const bf16* const* keys, const bf16* const* next, int64_t count, int64_t size, float* out) {
    int64_t d = 0;
    for (; d + 2 * VW <= size; d += 2 * VW)
        for (int64_t k = 0; k < count; k += VW) {
            vu rows[VW];
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) {
                rows[i] = keys[k + i] ? unaligned<vu>(keys[k + i] + d) : vu{};
                __builtin_prefetch(next[k + i] + d, 0, 2);
            }
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) {
                store(out + (d + 2 * i) * BLOCK + k, (vf)(rows[i] << 16));
                store(out + (d + 2 * i + 1) * BLOCK + k, (vf)(rows[i] & 0xffff0000u));
            }
        }
    if (d < size) load_keys(keys, next, count, d, size, out);
}

// Values [count] to f32 [count][padded size], zeros in the padding and for absent ones.
template <class T>
void load_values(const T* const* values, const T* const* next, int64_t count, int64_t size, int64_t padded, float* out) {
    for (int64_t k = 0; k < count; k++, out += padded) {
        const T* from = values[k];
        int64_t d = 0;
        if (from)
            for (; d + VW <= size; d += VW) {
                store(out + d, load(from + d));
                __builtin_prefetch(next[k] + d, 0, 2);
            }
        for (; d < padded; d += VW) store(out + d, from ? load_first(from + d, size - d) : vf{});
    }
}

// The running softmax of a tile's rows: greatest score, sum of weights, weighted sum of values.
struct Softmax {
    float *top, *sum, *values;
    void clear(int64_t rows, int64_t padded) {
        std::fill(top, top + rows, NONE);
        std::fill(sum, sum + rows, 0.0f);
        std::fill(values, values + rows * padded, 0.0f);
    }
};

float exp1(float x) { return vexp(set1(x))[0]; }

// The maximum that e^(score - top) is relative to; 0 for a row that has seen no key yet.
float finite(float top) { return top == NONE ? 0.0f : top; }

// into = into and then part: exact if either is empty.
void merge(Softmax into, Softmax part, int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < rows; r++) {
        if (part.top[r] == NONE) continue;
        const float top = std::max(into.top[r], part.top[r]);
        const float a = exp1(into.top[r] - top), b = exp1(part.top[r] - top);
        into.top[r] = top;
        into.sum[r] = into.sum[r] * a + part.sum[r] * b;
        float *to = into.values + r * padded, *from = part.values + r * padded;
        for (int64_t d = 0; d < padded; d += VW) store(to + d, load(to + d) * a + load(from + d) * b);
    }
}

struct Tile {
    int32_t segment, kv_head;
    int64_t first, count;              // queries of the segment
    int64_t first_part, last_part;     // [first, last) of the parts that any of them sees
    int64_t at;                        // where its parts are in the workspace, if threads share them
};

template <class C>
struct Attention {
    const Arguments& a;
    const int64_t dtype;  // of q and out
    const float scale, softcap;
    const int64_t groups = a.heads / a.kv_heads;
    const int64_t wide = round_up(a.size, VW), padded = round_up(a.value_size, VW);  // a query's and a value's floats
    const int64_t tile_queries = std::max<int64_t>(1, TILE_ROWS / groups), tile_rows = tile_queries * groups;
    const int64_t state = tile_rows * (padded + 2);

    Softmax softmax_at(float* memory) const { return {memory + tile_rows * padded, memory + tile_rows * (padded + 1), memory}; }
    int64_t queries(const Tile& t) const { return a.query_start[t.segment + 1] - a.query_start[t.segment]; }
    // Whether the tile's query is part of a draft tree. Such a tile has one query. Its ancestors' entries are read as if they
    // lay one behind the other, so that its bits are those of a chain.
    bool branches(const Tile& t) const {
        return a.origins && a.context[t.segment] - queries(t) + t.first >= a.origins[t.segment];
    }
    uint64_t ancestors(const Tile& t) const { return a.bits[a.query_start[t.segment] + t.first]; }
    // Position of a tile's query.
    int64_t position(const Tile& t, int64_t query) const {
        if (branches(t)) return a.origins[t.segment] - 1 + __builtin_popcountll(ancestors(t));
        return (a.table ? a.context[t.segment] - queries(t) : 0) + t.first + query;
    }
    // Position of the last key that it sees.
    int64_t last_seen(const Tile& t, int64_t query) const {
        if (a.table) return position(t, query);
        return std::min(queries(t), a.window ? position(t, query) + a.window : INT64_MAX) - 1;
    }
    int64_t first_seen(int64_t position) const { return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0; }

    int64_t head(const Tile& t, int64_t row) const { return t.kv_head * groups + row % groups; }

    // The tile's queries as f32 times scale, [row][size]; rows are query-major.
    void load_queries(const Tile& t, float* out) const {
        by_dtype(dtype, [&](auto type) {
            for (int64_t r = 0; r < t.count * groups; r++) {
                const int64_t token = a.query_start[t.segment] + t.first + r / groups;
                const auto* from = (const decltype(type)*)a.q + token * a.q_token + head(t, r) * a.q_head;
                for (int64_t d = 0; d < wide; d += VW) store(out + r * wide + d, load_upto(from + d, a.size - d) * scale);
            }
        });
    }

    // Weights of one row of scores over block `begin`, of which `count` were computed: masks, updates top and sum, rescales the
    // row's values. WHOLE: there are BLOCK scores, all visible. A score loses slope for each position between its key and
    // `begin` + `at`.
    template <bool WHOLE>
    INLINE void weigh(float* scores, int64_t count, int64_t low, int64_t high, float slope, int64_t at, Softmax s,
                      int64_t row) const {
        const int64_t vectors = WHOLE ? BLOCK / VW : count / VW;
        vf score[BLOCK / VW];
        vf top = set1(NONE);
        for (int64_t n = 0; n < vectors; n++) {
            vf v = load(scores + n * VW);
            if (softcap != 0.0f) v = softcap * vtanh(v / softcap);
            if (slope != 0.0f) v -= slope * vabs(__builtin_convertvector(iota() + (int32_t)(n * VW - at), vf));
            if (!WHOLE) {
                vi at = iota() + (int32_t)(n * VW);
                v = at < (int32_t)low ? set1(NONE) : v;
                v = at > (int32_t)high ? set1(NONE) : v;
            }
            score[n] = v;
            top = vmax(top, v);
        }
        const float before = s.top[row], now = std::max(before, hmax(top)), base = finite(now);
        vf sum = {};
        for (int64_t n = 0; n < vectors; n++) {
            vf weight = vexp(score[n] - base);
            sum += weight;
            store(scores + n * VW, weight);
        }
        s.top[row] = now;
        if (now != before) {
            const float shrink = exp1(before - base);
            s.sum[row] *= shrink;
            float* values = s.values + row * padded;
            for (int64_t d = 0; d < padded; d += VW) store(values + d, load(values + d) * shrink);
        }
        s.sum[row] += hsum(sum);
    }

    void weigh_rows(const Tile& t, float* scores, int64_t count, int64_t begin, Softmax s) const {
        for (int64_t r = 0; r < t.count * groups; r++) {
            const int64_t at = position(t, r / groups), low = std::max<int64_t>(0, first_seen(at) - begin);
            const int64_t high = std::min<int64_t>(last_seen(t, r / groups) - begin, BLOCK);
            const float slope = a.slopes ? a.slopes[head(t, r)] : 0.0f;
            if (count == BLOCK && low == 0 && high >= BLOCK - 1)
                weigh<true>(scores + r * BLOCK, count, low, high, slope, at - begin, s, r);
            else
                weigh<false>(scores + r * BLOCK, count, std::min(low, BLOCK), high, slope, at - begin, s, r);
        }
    }

    static constexpr bool CODED = std::is_same_v<C, code>;
    struct Entries {
        const C *key[BLOCK], *value[BLOCK];
        const uint8_t* scale[2][CODED ? BLOCK : 1];
    };

    // Where the entries of the block at `begin` lie; those outside of [live, end) are null.
    void locate(const Tile& t, int64_t begin, int64_t live, int64_t end, Entries& found) const {
        found = Entries{};
        const int64_t from = std::max(begin, live), to = std::min(begin + BLOCK, end);
        if (from >= to) return;
        const int32_t* table = a.table ? a.table + t.segment * a.table_row : nullptr;
        int64_t page = from / a.page, slot = from % a.page;
        const int64_t origin = branches(t) ? a.origins[t.segment] : to;
        uint64_t left = branches(t) ? ancestors(t) : 0;
        for (int64_t i = origin; i < from; i++) left &= left - 1;
        for (int64_t i = from; i < to; i++) {
            if (i >= origin) {
                const int64_t at = origin + __builtin_ctzll(left);
                left &= left - 1;
                page = at / a.page, slot = at % a.page;
            }
            const int64_t place = table ? table[page] : a.query_start[t.segment] + page;
            found.key[i - begin] = (const C*)a.k + place * a.k_page + t.kv_head * a.k_head + slot * a.k_slot;
            found.value[i - begin] = (const C*)a.v + place * a.v_page + t.kv_head * a.v_head + slot * a.v_slot;
            if constexpr (CODED) {
                found.scale[0][i - begin] = a.key.at(place, t.kv_head, slot);
                found.scale[1][i - begin] = a.value.at(place, t.kv_head, slot);
            }
            if (++slot == a.page) slot = 0, page++;
        }
    }

    // A block's keys, transposed, and its values as f32. Codes are decoded row by row into the cache that is nearest.
    void load_block(const Entries& now, const Entries& next, int64_t count, int64_t whole, float* keys, float* values) const {
        if constexpr (CODED) {
            float* rows = (float*)pool::scratch(6, BLOCK * a.size * sizeof(float));
            const float* found[BLOCK] = {};
            for (int64_t i = 0; i < count; i++) {
                float* value = values + i * padded;
                std::fill(value, value + padded, 0.0f);
                if (!now.key[i]) continue;
                found[i] = rows + i * a.size;
                decode_row(a.key, now.key[i], now.scale[0][i], a.size, rows + i * a.size);
                decode_row(a.value, now.value[i], now.scale[1][i], a.value_size, value);
            }
            load_keys(found, found, whole, 0, a.size, keys);
        } else {
            if constexpr (std::is_same_v<C, bf16>)
                load_key_pairs(now.key, next.key, whole, a.size, keys);
            else
                load_keys(now.key, next.key, whole, 0, a.size, keys);
            load_values(now.value, next.value, count, a.value_size, padded, values);
        }
    }

    // Adds part `part` of the keys to s, which is clear.
    void run_part(const Tile& t, int64_t part, const float* q, Softmax s) const {
        const int64_t rows = t.count * groups;
        const int64_t oldest = first_seen(position(t, 0)), newest = last_seen(t, t.count - 1);
        const int64_t live = first_seen(position(t, 0) - t.first);  // before it, pages may be stale
        float* keys = (float*)pool::scratch(4, (a.size * BLOCK + BLOCK * padded + rows * BLOCK) * sizeof(float));
        float *values = keys + a.size * BLOCK, *scores = values + BLOCK * padded;
        const int64_t end = std::min((part + 1) * PART, newest + 1), start = std::max(part * PART, oldest / BLOCK * BLOCK);
        Entries now, next;
        locate(t, start, live, end, next);
        for (int64_t begin = start; begin < end; begin += BLOCK) {
            const int64_t count = std::min(BLOCK, end - begin), whole = round_up(count, VW);
            now = next;
            locate(t, begin + BLOCK, live, end, next);
            load_block(now, next, count, whole, keys, values);
            product(rows, q, wide, keys, BLOCK, scores, BLOCK, whole, a.size, false);
            weigh_rows(t, scores, whole, begin, s);
            product(rows, scores, BLOCK, values, padded, s.values, padded, padded, count, true);
        }
    }

    void write(const Tile& t, Softmax s) const {
        by_dtype(dtype, [&](auto type) {
            for (int64_t r = 0; r < t.count * groups; r++) {
                const int64_t token = a.query_start[t.segment] + t.first + r / groups;
                auto* to = (decltype(type)*)a.out + (token * a.heads + head(t, r)) * a.value_size;
                const float* values = s.values + r * padded;
                float sum = s.sum[r], shrink = 1.0f;
                if (a.sinks) {
                    const float sink = a.sinks[head(t, r)], top = std::max(s.top[r], sink);
                    shrink = exp1(s.top[r] - top);
                    sum = sum * shrink + exp1(sink - top);
                }
                for (int64_t d = 0; d < a.value_size; d += VW)
                    store_upto(to + d, load(values + d) * shrink / sum, a.value_size - d);
            }
        });
    }

    // One tile on one thread.
    void run_tile(const Tile& t) const {
        float* q = (float*)pool::scratch(3, (tile_rows * wide + 2 * state) * sizeof(float));
        Softmax whole = softmax_at(q + tile_rows * wide), part = softmax_at(q + tile_rows * wide + state);
        const int64_t rows = t.count * groups;
        load_queries(t, q);
        whole.clear(rows, padded);
        run_part(t, t.first_part, q, whole);
        for (int64_t p = t.first_part + 1; p < t.last_part; p++) {
            part.clear(rows, padded);
            run_part(t, p, q, part);
            merge(whole, part, rows, padded);
        }
        write(t, whole);
    }

    std::vector<Tile> tiles(int64_t* parts, int64_t* cost) const {
        std::vector<Tile> found;
        for (int64_t s = 0; s < a.segments; s++)
            for (int64_t first = 0, n = a.query_start[s + 1] - a.query_start[s],
                 most = a.origins && a.origins[s] < a.context[s] ? 1 : tile_queries; first < n; first += most)
                for (int64_t h = 0; h < a.kv_heads; h++) {
                    Tile t{(int32_t)s, (int32_t)h, first, std::min(most, n - first), 0, 0, *parts};
                    t.first_part = first_seen(position(t, 0)) / PART;
                    t.last_part = last_seen(t, t.count - 1) / PART + 1;
                    *parts += t.last_part - t.first_part;
                    *cost += (last_seen(t, t.count - 1) + 1 - first_seen(position(t, 0))) * (t.count * groups + 4) * a.size;
                    found.push_back(t);
                }
        return found;
    }

    void run() const {
        int64_t parts = 0, cost = 0;
        const std::vector<Tile> all = tiles(&parts, &cost);
        const int64_t count = (int64_t)all.size();
        const bool worth = cost > 100000;
        if (!worth || count >= 4 * pool::threads() || parts == count)
            return pool::parallel_if(worth, count, [&](int64_t i) { run_tile(all[i]); });
        // Few tiles over many keys: threads share their parts (split-K), which are merged in the order of run_tile.
        std::vector<std::pair<int64_t, int64_t>> jobs;
        for (int64_t i = 0; i < count; i++)
            for (int64_t p = all[i].first_part; p < all[i].last_part; p++) jobs.emplace_back(i, p);
        float* workspace = (float*)pool::scratch(5, parts * state * sizeof(float));
        auto part_of = [&](const Tile& t, int64_t p) { return softmax_at(workspace + (t.at + p - t.first_part) * state); };
        pool::parallel((int64_t)jobs.size(), [&](int64_t j) {
            const Tile& t = all[jobs[j].first];
            float* q = (float*)pool::scratch(3, tile_rows * wide * sizeof(float));
            load_queries(t, q);
            Softmax part = part_of(t, jobs[j].second);
            part.clear(t.count * groups, padded);
            run_part(t, jobs[j].second, q, part);
        });
        for (const Tile& t : all) {
            Softmax whole = part_of(t, t.first_part);
            for (int64_t p = t.first_part + 1; p < t.last_part; p++) merge(whole, part_of(t, p), t.count * groups, padded);
            write(t, whole);
        }
    }
};

}  // namespace

// cache_dtype 3: codes.
EXPORT void penstock_attention(const Arguments* arguments, double scale, double softcap, int64_t dtype, int64_t cache_dtype) {
    if (cache_dtype == 3) return Attention<code>{*arguments, dtype, (float)scale, (float)softcap}.run();
    by_dtype(cache_dtype, [&](auto type) { Attention<decltype(type)>{*arguments, dtype, (float)scale, (float)softcap}.run(); });
}
