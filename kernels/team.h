// Threads that share the jobs of a run.
//
// Starting a parallel loop of a thread pool takes longer than many of the loops here. So a run starts a single one, in
// which one thread walks through the steps and hands out parts of them to the others, which wait without sleeping. Each
// has a share of adjacent parts, so that it reads memory in order, and then takes what is left of others' from their
// ends: if these arrive late or never, the walking thread does everything itself. While they wait for a part, they fetch
// the memory that is read next into their caches: the steps that are too small to share leave it idle.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace specexport {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Memory that a job reads, its parts in order.
struct Ahead {
  const uint8_t* data = nullptr;
  size_t bytes = 0;
};

class Team {
 public:
  using Part = void (*)(const void* job, int part);

  // The maximum number of threads, which determines the size of a job's parts.
  explicit Team(int threads) : threads_(threads), shares_(std::min(threads, kMostShares)) {}
  int threads() const { return threads_; }

  // Called by each thread of a parallel loop: the first walks, the others help until it has finished.
  template <typename Walk>
  void enter(Walk&& walk) {
    const int index = entered_.fetch_add(1, std::memory_order_acq_rel);
    if (index == 0) {
      try {
        walk();
      } catch (...) {
        error_ = std::current_exception();
      }
      finished_.store(true, std::memory_order_release);
    } else {
      help(index);
    }
  }

  // What will be read next; it must exist until the team has finished.
  void announce(const Ahead& ahead) { ahead_.store(&ahead, std::memory_order_release); }

  // Rethrows the walking thread's exception.
  void require_success() const {
    if (error_) std::rethrow_exception(error_);
  }

  // Calls work(0) .. work(parts - 1), which must not throw, on all threads, and returns when all are done.
  template <typename Work>
  void split(int parts, const Work& work) {
    if (parts <= 1 || threads_ == 1) {
      for (int i = 0; i < parts; i++) work(i);
      return;
    }
    part_.store([](const void* job, int part) { (*static_cast<const Work*>(job))(part); }, std::memory_order_relaxed);
    job_.store(&work, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t turn = ++turn_;
    for (int i = 0; i < shares_; i++) {
      const int64_t from = int64_t(parts) * i / shares_, to = int64_t(parts) * (i + 1) / shares_;
      free_[i].parts.store(turn << 40 | uint64_t(to) << 20 | uint64_t(from), std::memory_order_release);
    }
    take(turn, 0);
    for (int waited = 0; done_.load(std::memory_order_acquire) != parts; waited++) {
      relax();
      if (waited > kPatience) std::this_thread::yield();
    }
  }

 private:
  static constexpr int kPatience = 1 << 14;
  static constexpr uint64_t kMask = (1 << 20) - 1;
  static constexpr size_t kFetch = 192 << 10;  // bytes that the second cache of most processors holds beside others
  static constexpr int kMostShares = 16;       // threads beyond take from others' from the start

  struct alignas(64) Share {
    std::atomic<uint64_t> parts{0};  // turn, end and beginning of those that are free
  };

  void help(int index) {
    uint64_t seen = 0;
    const Ahead* fetched = nullptr;
    size_t from = 0, to = 0;  // what is left to fetch
    for (int waited = 0; !finished_.load(std::memory_order_acquire);) {
      const uint64_t turn = free_[index % shares_].parts.load(std::memory_order_acquire) >> 40;
      if (turn != seen) {
        waited = 0;
        seen = turn;
        take(turn, index);
        continue;
      }
      const Ahead* ahead = ahead_.load(std::memory_order_acquire);
      if (ahead != fetched) {
        fetched = ahead;
        const size_t share = ahead->bytes / size_t(threads_);
        from = size_t(index) * share;
        to = from + std::min(kFetch, share);
      }
      if (from < to) {
        for (int line = 0; line < 4; line++, from += 64) __builtin_prefetch(fetched->data + from, 0, 2);
        continue;
      }
      relax();
      if (++waited > kPatience) std::this_thread::yield();
    }
  }

  // Processes parts of a turn's job until none is left: the first ones of the thread's share, then the last ones of
  // others'. A job stays valid while a part is unfinished, and the exchange proves that a part was free.
  void take(uint64_t turn, int index) {
    for (int other = 0; other < shares_; other++) {
      std::atomic<uint64_t>& share = free_[(index + other) % shares_].parts;
      for (uint64_t parts = share.load(std::memory_order_acquire);;) {
        const uint64_t from = parts & kMask, to = parts >> 20 & kMask;
        if (parts >> 40 != turn || from >= to) break;
        const uint64_t without = other ? parts - (uint64_t(1) << 20) : parts + 1;
        if (!share.compare_exchange_weak(parts, without, std::memory_order_acq_rel)) continue;
        part_.load(std::memory_order_relaxed)(job_.load(std::memory_order_relaxed), int(other ? to - 1 : from));
        done_.fetch_add(1, std::memory_order_acq_rel);
        parts = share.load(std::memory_order_acquire);
      }
    }
  }

  static constexpr Ahead kNothing = {};
  const int threads_, shares_;
  uint64_t turn_ = 0;  // of the walking thread
  std::exception_ptr error_;
  Share free_[kMostShares];
  std::atomic<Part> part_{nullptr};
  std::atomic<const void*> job_{nullptr};
  std::atomic<const Ahead*> ahead_{&kNothing};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> entered_{0};
  std::atomic<bool> finished_{false};
};

}  // namespace specexport
