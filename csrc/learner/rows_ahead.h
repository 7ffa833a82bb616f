// Prefetching of the next mini-batch's rows during the products of the current one.
#pragma once

#include <initializer_list>

#include "head.h"

namespace {

// The heads of a token are neighbours in memory, so that one head's rows have a large stride, which the
// hardware does not prefetch. A processor has few buffers for outstanding lines. When they are in use, a
// prefetch blocks like the load that it should avoid. Each of `times` calls therefore prefetches a share
// of the rows, spread over the arithmetic.
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
      if (!x->data) continue;
      const int64_t offset = head.scan.batch * x->batch + head.scan.token(first) * x->token +
                             head.scan.head * x->head;
      next_[count_] = static_cast<const char*>(x->data) + offset * bytes;
      step_[count_++] = (head.scan.reverse ? -x->token : x->token) * bytes;
    }
    share_ = (count_ * rows_ + times - 1) / times;
  }

  VISION_TTT_INLINE void ask() {
    for (int64_t i = 0; i < share_ && at_ < count_; ++i) {
      // A fixed number of lines: with a mispredicted end of the loop a processor would fetch further.
      is_bfloat16_ ? prefetch_lines<2 * D>(next_[at_]) : prefetch_lines<4 * D>(next_[at_]);
      next_[at_] += step_[at_];
      if (--left_ == 0) left_ = rows_, ++at_;
    }
  }

 private:
  template <int kBytes>
  VISION_TTT_INLINE static void prefetch_lines(const char* row) {
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(row + line);
  }

  static constexpr int kMost = 4;
  bool is_bfloat16_;
  const char* next_[kMost];
  int64_t step_[kMost];
  int64_t rows_ = 0, left_ = 0;
  int64_t count_ = 0, share_ = 0, at_ = 0;
};

// The rows of a slice of a product with so many columns: two tiles.
constexpr int64_t slice_rows(int64_t cols) { return 2 * tile_rows(cols); }

constexpr int64_t slices(int64_t rows, int64_t cols) {
  return (rows + slice_rows(cols) - 1) / slice_rows(cols);
}

// A product of D columns in slices of its rows, with a prefetch before each slice.
template <int D, class Product>
VISION_TTT_INLINE void in_slices(int64_t rows, RowsAhead<D>& ahead, const Product& product) {
  constexpr int64_t kRows = slice_rows(D);
  for (int64_t i = 0; i < rows; i += kRows) {
    ahead.ask();
    product(i, rows - i < kRows ? rows - i : kRows);
  }
}

}  // namespace
