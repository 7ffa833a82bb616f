// Prefetching of the next mini-batch's rows during the products of the current one.
#pragma once

#include <initializer_list>

#include "head.h"

namespace {

// The heads of a token are neighbours in memory, so that one head's rows have a large stride, which the
// hardware does not prefetch. A processor has few buffers for outstanding lines. When they are in use, a
// prefetch blocks like the load that it should avoid. The rows are therefore spread evenly over `times`
// calls, between the tiles of products and the other arithmetic.
template <int D>
class RowsAhead {
 public:
  // Prefetch the tokens of `tensors` at the steps [start, start + n) of the scan, as far as they exist.
  RowsAhead(const Head& head, int64_t start, int64_t n, std::initializer_list<const Tokens*> tensors,
            int64_t times)
      : is_bfloat16_(head.p.is_bfloat16) {
    const Problem& p = head.p;
    const int64_t first = start < 0 ? 0 : start, end = start + n < p.length ? start + n : p.length;
    if (first >= end) return;
    const int64_t bytes = p.is_bfloat16 ? 2 : 4;
    rows_ = left_ = end - first;
    for (const Tokens* x : tensors) {
      if (!x->data || (count_ && next_row(head, *x, first) == next_[count_ - 1])) continue;  // q may be k
      next_[count_] = next_row(head, *x, first);
      step_[count_++] = (head.scan.reverse ? -x->token : x->token) * bytes;
    }
    all_ = count_ * rows_, times_ = times;
  }

  VISION_TTT_INLINE void ask() {
    for (due_ += all_; due_ >= times_ && at_ < count_; due_ -= times_) {
      // A fixed number of lines: with a mispredicted end of the loop a processor would fetch further.
      is_bfloat16_ ? prefetch_lines<2 * D>(next_[at_]) : prefetch_lines<4 * D>(next_[at_]);
      next_[at_] += step_[at_];
      if (--left_ == 0) left_ = rows_, ++at_;
    }
  }

 private:
  template <int kBytes>
  VISION_TTT_INLINE static void prefetch_lines(const char* row) {
    // To the second cache level: the first one is full of the current mini-batch and the state.
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(row + line, 0, 2);
  }

  static const char* next_row(const Head& head, const Tokens& x, int64_t step) {
    const Scan& scan = head.scan;
    const int64_t offset = scan.batch * x.batch + scan.token(step) * x.token + scan.head * x.head;
    return static_cast<const char*>(x.data) + offset * (head.p.is_bfloat16 ? 2 : 4);
  }

  static constexpr int kMost = 7;
  bool is_bfloat16_;
  const char* next_[kMost];
  int64_t step_[kMost];
  int64_t rows_ = 0, left_ = 0;
  int64_t count_ = 0, at_ = 0;
  int64_t all_ = 0, times_ = 1, due_ = 0;  // all_ / times_ rows are due at each call
};

// What a product calls between its tiles.
template <int D>
VISION_TTT_INLINE auto asking(RowsAhead<D>& ahead) {
  return [&ahead]() __attribute__((always_inline)) { ahead.ask(); };
}

}  // namespace
