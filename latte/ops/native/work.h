// Threads and scratch memory.
#pragma once
#include <sched.h>
#include <stdlib.h>

#include "args.h"
#include "vec.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(LATTE_STD_THREADS)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

LATTE_BEGIN

// One allocation carved into 64-byte aligned pieces; lives as long as the object.
class Scratch {
  public:
    explicit Scratch(int64_t bytes) : left_(bytes + 64), raw_((char*)malloc(size_t(bytes + 64))) {
        // Nothing sensible can be done without memory, and an exception must not cross the C interface.
        if (!raw_) abort();
        next_ = (char*)(((uintptr_t)raw_ + 63) & ~uintptr_t(63));
    }
    ~Scratch() { free(raw_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class T>
    T* take(int64_t n) {
        T* p = (T*)next_;
        const int64_t bytes = round_up(n * int64_t(sizeof(T)), 64);
        if ((left_ -= bytes) < 0) abort();
        next_ += bytes;
        return p;
    }
    template <class T>
    T* zeros(int64_t n) {
        T* p = take<T>(n);
        memset(p, 0, size_t(n) * sizeof(T));
        return p;
    }

  private:
    int64_t left_;
    char *raw_, *next_;
};
LATTE_INLINE int64_t room(int64_t n, int64_t size) { return round_up(n * size, 64); }

// Runs body(first, last) on each thread's share of `units`. The sanitizer build uses std::thread: ThreadSanitizer cannot see
// the barriers inside an uninstrumented OpenMP runtime.
template <class F>
void parallel(int64_t units, int64_t threads, F body) {
    threads = max64(1, min64(threads, units));
    if (threads == 1) return body(int64_t(0), units);
#if defined(LATTE_STD_THREADS)
    std::vector<std::thread> pool;
    for (int64_t i = 0; i < threads; ++i) pool.emplace_back([=] { body(units * i / threads, units * (i + 1) / threads); });
    for (auto& t : pool) t.join();
#elif defined(_OPENMP)
#pragma omp parallel num_threads(int(threads))
    {
        const int64_t id = omp_get_thread_num(), n = omp_get_num_threads();
        body(units * id / n, units * (id + 1) / n);
    }
#else
    body(int64_t(0), units);
#endif
}

// Stages of a call one after the other, each cut in pieces that threads take one by one. A stage is over when its last piece is
// done, whoever did it: one region serves many short stages, and where something else runs on the machine too, a thread that
// finds no free core is not waited for. All pieces of all stages are numbered through, so two counters are enough.
struct Relay {
    alignas(64) int64_t taken = 0;
    alignas(64) int64_t done = 0;
};

// One thread's way through the stages; every thread must pass the same ones in the same order.
class Runner {
  public:
    explicit Runner(Relay& relay) : relay_(relay) {}

    template <class F>
    void stage(int64_t pieces, F body) {
        const int64_t end = first_ + pieces;
        int64_t next = __atomic_load_n(&relay_.taken, __ATOMIC_RELAXED);
        while (next < end) {
            if (!__atomic_compare_exchange_n(&relay_.taken, &next, next + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
            body(next - first_);
            __atomic_fetch_add(&relay_.done, 1, __ATOMIC_RELEASE);
            next = __atomic_load_n(&relay_.taken, __ATOMIC_RELAXED);
        }
        first_ = end;
        for (int64_t turn = 0; __atomic_load_n(&relay_.done, __ATOMIC_ACQUIRE) < end; ++turn) turn < kPatience ? breathe() : (void)sched_yield();
    }

  private:
    static constexpr int64_t kPatience = 2000;  // some ten microseconds: a piece takes less, unless its thread lost its core

    static LATTE_INLINE void breathe() {
#if defined(__SSE2__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
    Relay& relay_;
    int64_t first_ = 0;  // number of the present stage's first piece
};

// Runs body(runner) on every thread.
template <class F>
void relay(int64_t threads, F body) {
    Relay counters;
    parallel(threads, threads, [&](int64_t, int64_t) {
        Runner runner(counters);
        body(runner);
    });
}

// Runs body(piece) for every piece, on whichever thread is free.
template <class F>
void share(int64_t pieces, int64_t threads, const F& body) {
    relay(min64(threads, pieces), [&](Runner& run) { run.stage(pieces, body); });
}

// A fresh output of 32 MB comes from the system in 8192 zeroed pages, and touching them takes longer than computing it: ask for
// large pages, and let all threads touch their share of them, or those that write to one page at the same time wait for each other
// while it is zeroed. Only whole large pages inside the block are concerned; what they hold stays.
LATTE_INLINE void large_pages(void* data, int64_t bytes, int64_t threads) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t(1) << 21;
    const uintptr_t from = ((uintptr_t)data + page - 1) & ~(page - 1), to = ((uintptr_t)data + uintptr_t(bytes)) & ~(page - 1);
    if (bytes < int64_t(4 * page) || to <= from) return;
    madvise((void*)from, to - from, MADV_HUGEPAGE);
    parallel(int64_t((to - from) / page), threads, [=](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) __atomic_fetch_or((char*)from + i * int64_t(page), 0, __ATOMIC_RELAXED);
    });
#else
    (void)data, (void)bytes, (void)threads;
#endif
}

// A sum over many tokens: in single precision only for kFold of them at a time.
constexpr int64_t kFold = 256;
template <class T>
void fold(double* total, T* sum, int64_t n) {
    for (int64_t i = 0; i < n; ++i) total[i] += double(sum[i]), sum[i] = 0;
}

// Waking threads costs some ten microseconds: not worth it for less than this many multiply-adds.
#ifndef LATTE_MIN_WORK
#define LATTE_MIN_WORK 2e5
#endif
LATTE_INLINE int64_t useful_threads(int64_t threads, double work) { return work < LATTE_MIN_WORK ? 1 : threads; }

// In how many pieces to cut each of `units` equal jobs so that threads are evenly busy; cutting costs repeated work, so the
// fewest pieces with at most an eighth of idle time win.
LATTE_INLINE int64_t pieces(int64_t units, int64_t threads, int64_t most) {
    int64_t best = 1;
    double best_load = 1e30;
    for (int64_t n = 1; n <= most; ++n) {
        const double load = double((units * n + threads - 1) / threads * threads) / double(units * n);
        if (load < best_load - 1e-9) best = n, best_load = load;
        if (load <= 1.125) break;
    }
    return best;
}

LATTE_END
