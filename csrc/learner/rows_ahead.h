// The rows of the next mini-batch, asked for while the products of this one run.
#pragma once

#include <initializer_list>

#include "head.h"

namespace {

// Heads lie side by side in a token, so that one head's rows are strides apart, which the hardware
// does not foresee. A processor has few buffers for lines on their way; once they are taken a
// prefetch waits like the load it is to spare. Hence a share of the rows at each of `times` calls,
// spread over the arithmetic.
template <int D>
class RowsAhead {
 public:
  RowsAhead(const Head& head, int64_t start, int64_t n, std::initializer_list<const Tokens*> tensors,
            int64_t times)
      : head_(head), start_(start), n_(n) {
    for (const Tokens* x : tensors) tensors_[count_++] = x;
    share_ = times > 0 ? (count_ * n + times - 1) / times : 0;
  }

  VISION_TTT_INLINE void ask() {
    for (int64_t i = 0; i < share_ && tensor_ < count_; ++i) {
      prefetch_row<D>(*tensors_[tensor_], head_.p.is_bfloat16, head_.scan, start_ + token_);
      if (++token_ == n_) token_ = 0, ++tensor_;
    }
  }

 private:
  static constexpr int kMost = 8;
  Head head_;
  int64_t start_, n_;
  const Tokens* tensors_[kMost];
  int64_t count_ = 0, share_ = 0;
  int64_t tensor_ = 0, token_ = 0;  // the next row to ask for
};

// A product of D columns in slices of `rows` rows, with a call for rows ahead before each.
constexpr int64_t slices(int64_t rows, int64_t cols) {
  return (rows + tile_rows(cols) - 1) / tile_rows(cols);
}

template <int D, class Product>
VISION_TTT_INLINE void in_slices(int64_t rows, RowsAhead<D>& ahead, const Product& product) {
  constexpr int64_t kRows = tile_rows(D);
  for (int64_t i = 0; i < rows; i += kRows) {
    ahead.ask();
    product(i, rows - i < kRows ? rows - i : kRows);
  }
}

}  // namespace
