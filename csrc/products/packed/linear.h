// A linear layer on packed weights.
#pragma once

#include "../../amx/pack.h"
#include "chunks.h"
#include "product.h"

namespace {

// `count` numbers in the product's precision, with zeros after them up to `room`.
template <class Element, class In>
VISION_TTT_INLINE void copy_padded(const In* from, int64_t count, Element* to, int64_t room) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  // The remainder uses vectors of its own, because both rows end there.
  if (i < room) {
    In some[kLanes] = {};
    Element rounded[kLanes];
    std::memcpy(some, from + i, (count - i) * sizeof(In));
    store(rounded, load(some));
    std::memcpy(to + i, rounded, (room - i) * sizeof(Element));
  }
}

// The chunk's rows in the product's precision: a copy of x.
template <class Element, class In>
const Element* inputs(const In* x, int64_t x_row, int64_t rows, int64_t inner, int64_t padded,
                      Scratch& scratch) {
  Element* copy = scratch.take<Element>(rows * padded);
  for (int64_t t = 0; t < rows; ++t) copy_padded(x + t * x_row, inner, copy + t * padded, padded);
  return copy;
}

// A weight for products of so many rows: one in float32 as terms, if there are tile registers, and if that pays.
class ForRows {
  static constexpr int64_t kRows = 512, kInner = 48;

 public:
  ForRows(const Packed& w, const float*, int64_t rows, int64_t threads)
      : weight_(w), in_terms_(kHasTiles && rows >= kRows && w.inner >= kInner), terms_(in_terms_ ? bytes(w) : 0) {
    if (!in_terms_ || !terms_.ok()) return;
    constexpr int64_t kBlock = kInnerOfTile / 2;
    float* terms = terms_.take(floats_of_terms(w.inner) * columns(w));
#pragma omp parallel for num_threads(int(threads)) if (threads > 1)
    for (int64_t c = 0; c < columns(w); c += kPanel) {
      const float* panel = static_cast<const float*>(w.data) + w.inner * c;
      const auto copy = [&](int64_t k, float* to) {
        const int64_t left = w.inner - k;
        std::memcpy(to, panel + k * kPanel, (left < kBlock ? left : kBlock) * kPanel * sizeof(float));
      };
      pack_terms<kBlock>(w.inner, copy, terms + floats_of_terms(w.inner) * c);
    }
    weight_.data = terms, weight_.in_terms = 1;
  }
  ForRows(const Packed& w, const Bfloat16*, int64_t, int64_t) : weight_(w), in_terms_(false), terms_(0) {}

  bool ok() const { return !in_terms_ || terms_.ok(); }
  const Packed& weight() const { return weight_; }

 private:
  static int64_t columns(const Packed& w) { return (w.columns + kPanel - 1) / kPanel * kPanel; }
  static size_t bytes(const Packed& w) {
    return Scratch::padded(floats_of_terms(w.inner) * columns(w) * sizeof(float));
  }

  Packed weight_;
  bool in_terms_;
  Scratch terms_;
};

template <class Element, class In>
int linear(const PackedLinear& p) {
  const int64_t inner = p.weight.inner, columns = p.weight.columns;
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  const int64_t padded = (inner + step - 1) / step * step;
  const bool as_it_is = std::is_same<Element, In>::value && padded == inner;
  const ForRows given(p.weight, static_cast<const Element*>(nullptr), p.rows, p.threads);
  if (!given.ok()) return 1;
  const Packed& weight = given.weight();
  const Chunks chunks = Chunks(1, p.rows, p.threads);
  const size_t bytes = as_it_is ? 0 : Scratch::padded(chunks.most() * padded * sizeof(Element));
  auto multiply = [&](const Chunk& c, const Part& part, Scratch& scratch) {
    const In* x = static_cast<const In*>(p.x) + c.start * p.x_row;
    In* out = static_cast<In*>(p.out) + c.start * columns + part.first;
    const float* bias = p.weight.bias ? p.weight.bias + part.first : nullptr;
    const Sink<In> sink{out, columns, part.columns, bias};
    if constexpr (std::is_same<Element, In>::value)
      if (as_it_is) return product(x, p.x_row, c.count, weight, part, sink);
    product(inputs<Element>(x, p.x_row, c.count, inner, padded, scratch), padded, c.count, weight, part,
            sink);
  };
  if (chunks.count() == 1) {  // of so few rows that the threads had better share the columns
    const Chunks shares = Chunks(1, (columns + kGroup - 1) / kGroup, p.threads, 1);
    return for_each_chunk(shares, p.threads, bytes, [&](const Chunk& groups, Scratch& scratch) {
      Part part(weight);
      part.first = groups.start * kGroup;
      const int64_t left = columns - part.first, own = groups.count * kGroup;
      part.columns = own < left ? own : left;
      multiply(chunks[0], part, scratch);
    });
  }
  return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
    multiply(c, Part(weight), scratch);
  });
}

}  // namespace
