#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
static inline void relax() { __builtin_ia32_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace pool {
namespace {

using Clock = std::chrono::steady_clock;

// The time that a thread spins before it sleeps: longer than the gap between two operations of a step, far shorter than a
// time slice of the system's scheduler.
constexpr auto SPIN = std::chrono::microseconds(60);

struct Pool {
    std::mutex caller;
    // Both halves change together: total chunks in the upper, next unclaimed in the lower 32 bits. A thread that comes
    // late claims nothing from a finished job, and a whole chunk from the next one.
    alignas(64) std::atomic<uint64_t> claim{0};
    alignas(64) std::atomic<uint32_t> pending{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    void (*work)(void*, int64_t) = nullptr;
    void* context = nullptr;
    int started = 0;
};

// Never destroyed: threads may still sleep in it while the process exits.
Pool* shared = new Pool;
std::atomic<int> wanted{std::max(1, (int)std::thread::hardware_concurrency())};
thread_local bool inside = false;

template <class Done>
bool spin(Done done) {
    auto end = Clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() < end);
    return false;
}

void drain(Pool* p) {
    for (;;) {
        uint64_t claimed = p->claim.fetch_add(1, std::memory_order_acq_rel);
        uint32_t total = claimed >> 32, index = (uint32_t)claimed;
        if (index >= total) return;
        // The job cannot end, so these cannot change, before this chunk is done.
        p->work(p->context, index);
        if (p->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) p->pending.notify_one();
    }
}

void serve(Pool* p, int index) {
    inside = true;
    uint32_t seen = 0;
    for (;;) {
        auto news = [&] { return p->epoch.load(std::memory_order_acquire) != seen; };
        if (!spin(news)) p->epoch.wait(seen, std::memory_order_acquire);
        seen = p->epoch.load(std::memory_order_acquire);
        if (index < wanted.load(std::memory_order_relaxed)) drain(p);
    }
}

// False if the system grants no more threads; fewer then share the work.
bool start(Pool* p, int index) {
    try {
        std::thread([p, index] { serve(p, index); }).detach();
        return true;
    } catch (const std::system_error&) {
        return false;
    }
}

// After fork, the child has the memory but not the threads.
void renew() {
    shared = new Pool;
    inside = false;
}

}  // namespace

int threads() { return wanted.load(std::memory_order_relaxed); }

void set_threads(int n) { wanted.store(std::max(1, n)); }

void run(int64_t n, void (*work)(void*, int64_t), void* context) {
    static const int registered = pthread_atfork(nullptr, nullptr, renew);
    (void)registered;
    int count = threads();
    Pool* p = shared;
    if (n <= 1 || count <= 1 || inside || n > INT32_MAX || !p->caller.try_lock()) {
        for (int64_t i = 0; i < n; i++) work(context, i);
        return;
    }
    while (p->started < count - 1 && start(p, p->started + 1)) p->started++;
    inside = true;
    p->work = work;
    p->context = context;
    p->pending.store((uint32_t)n, std::memory_order_relaxed);
    p->claim.store((uint64_t)n << 32, std::memory_order_release);
    p->epoch.fetch_add(1, std::memory_order_release);
    p->epoch.notify_all();
    drain(p);
    auto done = [&] { return p->pending.load(std::memory_order_acquire) == 0; };
    if (!spin(done))
        for (uint32_t left; (left = p->pending.load(std::memory_order_acquire)) != 0;) p->pending.wait(left);
    inside = false;
    p->caller.unlock();
}

void* scratch(int slot, size_t bytes) {
    struct Buffer {
        void* data = nullptr;
        size_t size = 0;
        ~Buffer() { free(data); }
    };
    static thread_local Buffer buffers[9];
    Buffer& b = buffers[slot];
    if (b.size < bytes) {
        free(b.data);
        b.size = (bytes + 4095) / 4096 * 4096;
        b.data = aligned_alloc(64, b.size);
    }
    return b.data;
}

void advise_huge([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (bytes >= (2 << 20) && end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace pool

extern "C" __attribute__((visibility("default"))) void penstock_set_threads(int64_t n) { pool::set_threads((int)n); }
extern "C" __attribute__((visibility("default"))) int64_t penstock_threads() { return pool::threads(); }
