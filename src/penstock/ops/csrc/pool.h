// The thread pool of the kernels. The caller and all awake threads claim chunks of work from one counter, so a thread that is
// late or was preempted delays only its own chunk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pool {

// Threads that take part, the caller included.
int threads();
void set_threads(int n);

// Calls work(context, i) for every i in [0, n), each once, in any order, on any thread; returns when all are done.
// If another caller uses the pool, or from within work, all calls are made on this thread.
void run(int64_t n, void (*work)(void*, int64_t), void* context);

template <class F>
inline void parallel(int64_t n, const F& body) {
    run(n, [](void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, const_cast<F*>(&body));
}

// As parallel, or a plain loop where the work is too small to wake threads for.
template <class F>
inline void parallel_if(bool worth, int64_t n, const F& body) {
    if (worth)
        parallel(n, body);
    else
        for (int64_t i = 0; i < n; i++) body(i);
}

// Memory of this thread that lives until its next call with the same slot; aligned to 64 bytes, contents undefined.
void* scratch(int slot, size_t bytes);

// Advises huge pages before memory is first touched: fewer TLB misses while weights are streamed. The system may ignore it.
void advise_huge(void* memory, int64_t bytes);

}  // namespace pool
