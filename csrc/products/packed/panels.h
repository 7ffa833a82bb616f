// Packed weights in panels of columns, and their parts.
#pragma once

#include <type_traits>

#include "../../amx/terms.h"
#include "../../bfloat16.h"
#include "packed.h"

namespace {

// The numbers of the inner axis that one instruction multiplies.
constexpr int64_t step_of(const float*) { return 1; }
constexpr int64_t step_of(const Bfloat16*) { return 2; }

// 6 rows of 4 vectors fill 32 registers, 6 of 2 fill 16. 10 sums or more hide the latency of a
// multiply-add.
constexpr int kTileRows = 6;
constexpr int kTileVectors = VISION_TTT_REGISTERS == 32 ? 4 : 2;

// Numbers of an Element in a panel's column, given its inner axis: padded to whole instructions.
template <class Element>
constexpr int64_t numbers_of_column(int64_t inner) {
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  return (inner + step - 1) / step * step;
}

// The columns of a panel of weights, and of the panels that a tile reads at once.
constexpr int64_t kPanel = 16;
constexpr int64_t kGroup = kTileVectors * kLanes > kPanel ? kTileVectors * kLanes : kPanel;

// Weights that are read next: `count` pieces of panels, which begin `stride` bytes apart.
struct Pieces {
  const void* first = nullptr;
  int64_t count = 0, bytes = 0, stride = 0;
};

// A part of a weight: columns from `first` (a multiple of kPanel), and a range of the inner axis.
struct Part {
  int64_t first, columns, inner_start, inner;

  explicit Part(const Packed& w) : first(0), columns(w.columns), inner_start(0), inner(w.inner) {}
};

// A part of a packed weight as its Element.
template <class Element>
struct Panels {
  static constexpr int64_t kStep = step_of(static_cast<const Element*>(nullptr));
  const Element* first;
  int64_t stride, inner, columns;  // of a panel, and padded
  bool in_terms;

  Panels(const Packed& w, const Part& part)
      : stride(numbers(w, w.inner) * kPanel),
        inner((part.inner + kStep - 1) / kStep * kStep),
        columns((part.columns + kPanel - 1) / kPanel * kPanel), in_terms(w.in_terms) {
    first = static_cast<const Element*>(w.data) + part.first / kPanel * stride +
            numbers(w, part.inner_start) * kPanel;
  }

  const Element* at(int64_t column) const {
    return first + column / kPanel * stride + column % kPanel * kStep;
  }
  int64_t width(int64_t column) const {  // of the group that begins there
    return columns - column < kGroup ? columns - column : kGroup;
  }
  Pieces group(int64_t column) const {
    constexpr int64_t size = sizeof(Element);
    return {at(column), width(column) / kPanel, inner * kPanel * size, stride * size};
  }

 private:
  static int64_t numbers(const Packed& w, int64_t inner) {
    return kHasTiles && w.in_terms ? floats_of_terms(inner) : numbers_of_column<Element>(inner);
  }
};

// What a product with a weight, or with a part of it, reads first.
template <class Element>
Pieces begin_of(const Packed& w, const Part& part) {
  return w.data ? Panels<Element>(w, part).group(0) : Pieces{};
}
template <class Element>
Pieces begin_of(const Packed& w) {
  return begin_of<Element>(w, Part(w));
}

}  // namespace
