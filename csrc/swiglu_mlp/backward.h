// The backward pass of a SwiGLU MLP, which computes the hidden layer again, in slices of hidden units
// and chunks of tokens, so that intermediate results, the weights in use and the sums of their gradients
// stay in a core's second cache level.
#pragma once

#include "../functions.h"
#include "../linear/pack.h"
#include "../linear/weight_gradient.h"
#include "swiglu_mlp.h"

namespace {

// Given a, b and the gradient of h = SiLU(a) ⊙ b, replace a and b by their gradients, and the gradient
// of h by h.
VISION_TTT_INLINE void swiglu_gradients(float* a, float* b, float* h, int64_t rows, int64_t count) {
  for (int64_t t = 0; t < rows; ++t, a += kRowAtOnce, b += kRowAtOnce, h += kRowAtOnce)
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vector x = load(a + i), value = load(b + i), incoming = load(h + i), s = sigmoid(x);
      store(a + i, incoming * value * (s + x * s * (1.0f - s)));
      store(b + i, incoming * x * s);
      store(h + i, x * s * value);
    }
}

class SwiGluMlpBackward {
 public:
  explicit SwiGluMlpBackward(const SwiGluMlpProblem& p) : p_(p), parts_(p.rows) {}

  int run() const {
    const int64_t dim = p_.dim, hidden = p_.hidden, columns = p_.columns;
    const size_t up = hidden * dim, down = hidden * columns;
    Buffers buffers(4 * Buffers::padded(up * sizeof(float)) +
                    Buffers::padded(down * sizeof(float)) +
                    parts_.count() * floats_of_part() * sizeof(float));
    if (!buffers.ok()) return 1;
    auto room = [&](size_t count) { return buffers.take<float>(count); };
    const ToPack weights[4] = {
        {Matrix::of(p_.up, hidden, dim), room(up)},
        {Matrix::of(p_.up + up, hidden, dim), room(up)},
        {Matrix::transposed(p_.down, hidden, columns, hidden), room(down)},
        {Matrix::transposed(p_.up, dim, 2 * hidden, dim), room(2 * up)}};
    const Packed gate = weights[0].weight(), value = weights[1].weight();
    const Packed down_back = weights[2].weight(), up_back = weights[3].weight();
    float* of_parts = room(parts_.count() * floats_of_part());
    pack_all(weights, p_.threads);
#pragma omp parallel num_threads(int(p_.threads)) if (p_.threads > 1)
    for (int64_t first = 0; first < hidden; first += kColumnsAtOnce) {
      const int64_t count = hidden - first < kColumnsAtOnce ? hidden - first : kColumnsAtOnce;
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts_.count(); ++part) {
        float* memory = of_parts + part * floats_of_part();
        for (size_t i = 0; i < sums(); i += kLanes) store(memory + i, Vector{});
        parts_.for_each_chunk(part, [&](int64_t start, int64_t rows) {
          add_chunk(start, rows, gate, value, down_back, up_back, first, count, memory);
        });
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; ++i) add_up(of_parts, first, i);
    }
    return 0;
  }

 private:
  const SwiGluMlpProblem& p_;
  Parts parts_;

  // The memory of a part: the sums for some rows of up's two halves [2, kColumnsAtOnce, D] and columns
  // of down [kColumnsAtOnce, E], then the hidden layer of a chunk, and a panel.
  size_t sums() const { return kColumnsAtOnce * (2 * p_.dim + p_.columns); }
  size_t floats_of_part() const {
    return sums() + kRowsOfChunk * (3 * kRowAtOnce + kPanel);
  }

  void add_chunk(int64_t start, int64_t rows, const Packed& gate, const Packed& value,
                 const Packed& down_back, const Packed& up_back, int64_t first, int64_t count,
                 float* memory) const {
    const int64_t dim = p_.dim, columns = p_.columns;
    const float *x = p_.x + start * dim, *grad = p_.grad + start * columns;
    float *a = memory + sums(), *b = a + kRowsOfChunk * kRowAtOnce;
    float *h = b + kRowsOfChunk * kRowAtOnce;
    float *panel = h + kRowsOfChunk * kRowAtOnce, *dx = p_.dx + start * dim;

    auto units = [&](const Packed& weight) {
      Part part(weight);
      part.first = first, part.columns = count;
      return part;
    };
    product(x, dim, rows, gate, units(gate), Sink<float>{a, kRowAtOnce, count});
    product(x, dim, rows, value, units(value), Sink<float>{b, kRowAtOnce, count});
    product(grad, columns, rows, down_back, units(down_back), Sink<float>{h, kRowAtOnce, count});
    swiglu_gradients(a, b, h, rows, count);

    auto back = [&](const float* from, int64_t start, const float* add) {
      Part part(up_back);
      part.inner_start = start, part.inner = count;
      product(from, kRowAtOnce, rows, up_back, part,
              Sink<float>{dx, dim, dim, nullptr, nullptr, add, dim});
    };
    back(a, first, first ? dx : nullptr);
    back(b, p_.hidden + first, dx);

    float *of_value = memory + kColumnsAtOnce * dim, *of_down = of_value + kColumnsAtOnce * dim;
    add_outer_products(a, kRowAtOnce, count, x, dim, dim, rows, panel, memory);
    add_outer_products(b, kRowAtOnce, count, x, dim, dim, rows, panel, of_value);
    add_outer_products(h, kRowAtOnce, count, grad, columns, columns, rows, panel, of_down);
  }

  // The gradients of one hidden unit's weights.
  void add_up(float* of_parts, int64_t first, int64_t i) const {
    const int64_t dim = p_.dim, columns = p_.columns, apart = floats_of_part();
    for (int64_t half = 0; half < 2; ++half)
      add_parts(of_parts + (half * kColumnsAtOnce + i) * dim, apart, parts_.count(), dim,
                p_.dup + (half * p_.hidden + first + i) * dim);
    float* down = of_parts + 2 * kColumnsAtOnce * dim + i * columns;
    add_parts(down, apart, parts_.count(), columns, down);
    for (int64_t e = 0; e < columns; ++e) p_.ddown[e * p_.hidden + first + i] = down[e];
  }
};

}  // namespace
