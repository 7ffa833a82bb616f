// The relative speeds of the threads of a team. Cores differ where some are made to save power, or where other
// programs run on them.
#pragma once

#include <cstdint>

namespace {

class Speeds {
 public:
  // Those of the calling thread's team, or null where there is nothing to divide.
  static Speeds* of_team(int64_t threads) {
    if (threads < 2 || threads > kMost) return nullptr;
    thread_local Speeds speeds;
    if (speeds.threads_ != threads) speeds = Speeds(threads);
    return &speeds;
  }

  // Where part n of `length` rows begins, with a part for each thread.
  int64_t begin(int64_t n, int64_t length) const {
    double before = 0, all = 0;
    for (int64_t i = 0; i < threads_; ++i) {
      if (i < n) before += relative_[i];
      all += relative_[i];
    }
    return int64_t(double(length) * (before / all) + 0.5);
  }

  // Thread n took so long for its part of a pass. Threads may call it at the same time.
  void record(int64_t n, int64_t rows, double seconds) {
    seconds_[n] = seconds;
    rate_[n] = double(rows) / (seconds > 1e-9 ? seconds : 1e-9);
  }

  // After a pass: half of what was known and half of what was seen, within the bounds.
  void learn() {
    double rate = 0, seconds = 0;
    for (int64_t i = 0; i < threads_; ++i) rate += rate_[i], seconds += seconds_[i];
    // Shorter passes tell more of caches and clocks than of cores.
    if (!(seconds > threads_ * kShortest)) return;
    for (int64_t i = 0; i < threads_; ++i) {
      const double seen = rate_[i] * threads_ / rate;
      relative_[i] = (relative_[i] + (seen < kLeast ? kLeast : seen > kMuch ? kMuch : seen)) / 2;
    }
  }

 private:
  static constexpr int64_t kMost = 64;
  static constexpr double kShortest = 1e-4;
  // A thread that was interrupted for once would otherwise get next to nothing in the following pass.
  static constexpr double kLeast = 2.0 / 3.0, kMuch = 4.0 / 3.0;

  explicit Speeds(int64_t threads = 0) : threads_(threads) {
    for (int64_t i = 0; i < threads; ++i) relative_[i] = rate_[i] = 1.0, seconds_[i] = 0.0;
  }

  int64_t threads_;
  double relative_[kMost], rate_[kMost], seconds_[kMost];
};

}  // namespace
