// Prefetches of the rows that are processed next.
#pragma once

#include "panels.h"

namespace {

// A line from memory takes as long as a whole step of a product in tile registers, and rows that begin far
// apart are not fetched ahead by the processor. Each step of the current rows' products asks for some lines of
// the next rows, which are in the second cache level when their turn comes.
class NextRows {
 public:
  // `rows` rows of so many floats, `row` floats apart.
  void add(const float* first, int64_t rows, int64_t row, int64_t floats) {
    if (rows <= 0) return;
    pieces_[count_++] = {first, rows, floats * kFloat, row * kFloat};
    lines_ += rows * ((floats * kFloat + kLine - 1) / kLine);
    if (count_ == 1) begin();
  }
  // All lines are asked for in so many calls of fetch().
  void spread(int64_t calls) { share_ = (lines_ + calls - 1) / calls; }

  VISION_TTT_INLINE void fetch() {
    for (int64_t i = 0; i < share_ && at_ < count_; ++i) {
      __builtin_prefetch(next_, 0, 2);
      next_ += kLine;
      if (next_ < end_) continue;
      const Pieces& rows = pieces_[at_];
      next_ = end_ - rows.bytes + rows.stride, end_ += rows.stride;
      if (--left_ == 0) ++at_, begin();
    }
  }

 private:
  static constexpr int kMost = 4;
  static constexpr int64_t kLine = 64, kFloat = sizeof(float);

  void begin() {
    if (at_ == count_) return;
    next_ = static_cast<const char*>(pieces_[at_].first);
    end_ = next_ + pieces_[at_].bytes;
    left_ = pieces_[at_].count;
  }

  Pieces pieces_[kMost];
  const char *next_ = nullptr, *end_ = nullptr;
  int64_t left_ = 0, lines_ = 0, share_ = 0;
  int count_ = 0, at_ = 0;
};

// The steps of a product in tile registers, at each of which rows can be fetched.
constexpr int64_t steps_of_product(int64_t rows, int64_t inner, int64_t columns) {
  constexpr int64_t side = 32;
  return (rows + side - 1) / side * ((inner + side - 1) / side) * ((columns + side - 1) / side);
}

}  // namespace
