// A linear layer in training, for one instruction set. The build compiles this file once for each.
#include "linear.h"

#include "pack.h"
#include "weight_gradient.h"

namespace {

// dx = grad · weight, and the weight's gradient in slices of columns.
class LinearBackward {
 public:
  explicit LinearBackward(const Linear& p) : p_(p), parts_(p.rows) {}

  int run() const {
    const Matrix transposed = Matrix::transposed(p_.weight, p_.inner, p_.columns, p_.inner);
    const size_t weight_floats = p_.columns * p_.inner;
    Buffers buffers(Buffers::padded(weight_floats * sizeof(float)) +
                    parts_.count() * floats_of_part() * sizeof(float));
    if (!buffers.ok()) return 1;
    const ToPack weight[1] = {{transposed, buffers.take<float>(weight_floats)}};
    float* of_parts = buffers.take<float>(parts_.count() * floats_of_part());
    pack_all(weight, p_.threads);
    const Packed packed = weight[0].weight();
#pragma omp parallel num_threads(int(p_.threads)) if (p_.threads > 1)
    for (int64_t first = 0; first < p_.columns; first += kColumnsAtOnce) {
      const int64_t left = p_.columns - first;
      const int64_t count = left < kColumnsAtOnce ? left : kColumnsAtOnce;
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts_.count(); ++part) {
        float* memory = of_parts + part * floats_of_part();
        for (size_t i = 0; i < sums(); i += kLanes) store(memory + i, Vector{});
        parts_.for_each_chunk(part, [&](int64_t start, int64_t rows) {
          const float* grad = p_.grad + start * p_.columns;
          if (!first)
            product(grad, p_.columns, rows, packed,
                    Sink<float>{p_.dx + start * p_.inner, p_.inner, p_.inner});
          add_chunk(grad + first, p_.x + start * p_.inner, rows, count, memory);
        });
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; ++i)
        add_parts(of_parts + i * p_.inner, floats_of_part(), parts_.count(), p_.inner,
                  p_.dweight + (first + i) * p_.inner);
    }
    return 0;
  }

 private:
  const Linear& p_;
  Parts parts_;

  // The memory of a part: the sums [kColumnsAtOnce, D], then some columns of a chunk, and a panel.
  size_t sums() const { return kColumnsAtOnce * p_.inner; }
  size_t floats_of_part() const { return sums() + kRowsOfChunk * (kRowAtOnce + kPanel); }

  void add_chunk(const float* grad, const float* x, int64_t rows, int64_t count,
                 float* memory) const {
    float *some = memory + sums(), *panel = some + kRowsOfChunk * kRowAtOnce;
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t j = 0; j < count; j += kLanes)
        store(some + t * kRowAtOnce + j, load(grad + t * p_.columns + j));
    add_outer_products(some, kRowAtOnce, count, x, p_.inner, p_.inner, rows, panel, memory);
  }
};

}  // namespace

int VISION_TTT_KERNEL(linear)(const Linear& p) {
  const Matrix matrix = Matrix::of(p.weight, p.columns, p.inner);
  Buffers buffers(matrix.bytes());
  if (!buffers.ok()) return 1;
  const ToPack weight[1] = {{matrix, buffers.take<float>(p.columns * p.inner)}};
  pack_all(weight, p.threads);
  const Packed packed = weight[0].weight();
  return for_each_chunk(Chunks(1, p.rows, p.threads), p.threads, 0, [&](const Chunk& c, Buffers&) {
    product(p.x + c.start * p.inner, p.inner, c.count, packed,
            Sink<float>{p.out + c.start * p.columns, p.columns, p.columns, p.bias});
  });
}

int VISION_TTT_KERNEL(linear_backward)(const Linear& p) { return LinearBackward(p).run(); }
