// Threads that work on one task together, and chunks of tokens that are visited twice.
#pragma once

#include <atomic>
#include <thread>

namespace {

// Where the threads of a team wait for each other.
class Meeting {
 public:
  // Return when `size` threads have called it; what they wrote before is then visible to all.
  void wait(int64_t size) {
    if (size == 1) return;
    const int64_t number = number_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      number_.store(number + 1, std::memory_order_release);
    } else {
      while (number_.load(std::memory_order_acquire) == number) std::this_thread::yield();
    }
  }

 private:
  std::atomic<int64_t> arrived_{0}, number_{0};
};

// A thread's place in its team.
struct Member {
  Meeting& meeting;
  int64_t team, index, size;  // of the team

  void meet() const { meeting.wait(size); }

  // The member's share of `count` things, in units of `unit`.
  struct Share {
    int64_t begin, end;
    int64_t count() const { return end - begin; }
  };
  Share share(int64_t count, int64_t unit) const {
    const int64_t units = (count + unit - 1) / unit;
    const int64_t end = units * (index + 1) / size * unit;
    return {units * index / size * unit, end < count ? end : count};
  }
};

// What has been done on a chunk that has two visitors.
class Progress {
 public:
  enum Stage { kUntouched, kClaimed, kProjected, kScanned };

  // True for the first visitor.
  bool claim() {
    int untouched = kUntouched;
    return stage_.compare_exchange_strong(untouched, kClaimed, std::memory_order_relaxed);
  }
  void reach(Stage stage) { stage_.store(stage, std::memory_order_release); }
  void wait_for(Stage stage) const {
    while (stage_.load(std::memory_order_acquire) < stage) std::this_thread::yield();
  }

 private:
  std::atomic<int> stage_{kUntouched};
};

}  // namespace
