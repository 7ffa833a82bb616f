// A linear layer in training, for one instruction set. The build compiles this file once for each.
#include "linear.h"

#include "pack.h"
#include "weight_gradient.h"

namespace {

constexpr int64_t kInnerAtOnce = 2048;

// out [N, columns of the weight] = x weight + bias by a weight that is packed first.
int multiply(const float* x, const Matrix& matrix, const float* bias, float* out, int64_t rows,
             int64_t threads) {
  Buffers buffers(ToPack::bytes(matrix));
  if (!buffers.ok()) return 1;
  const ToPack weight[1] = {{matrix, buffers}};
  pack_all(weight, threads);
  const Packed packed = weight[0].weight();
  // All tokens use a part of a deep weight before the next one, since the last cache level holds no more.
  Part part(packed);
  int failed = 0;
  for (int64_t start = 0; start < matrix.inner && !failed; start += kInnerAtOnce) {
    part.inner_start = start;
    part.inner = matrix.inner - start < kInnerAtOnce ? matrix.inner - start : kInnerAtOnce;
    failed = for_each_chunk(Chunks(1, rows, threads), threads, 0, [&](const Chunk& c, Buffers&) {
      float* sums = out + c.start * matrix.columns;
      product(x + c.start * matrix.inner + start, matrix.inner, c.count, packed, part,
              Sink<float>{sums, matrix.columns, matrix.columns, start ? nullptr : bias, nullptr,
                          start ? sums : nullptr, matrix.columns});
    });
  }
  return failed;
}

Matrix transposed(const Linear& p) {
  return Matrix::transposed(p.weight, p.inner, p.columns, p.inner);
}

// dx = grad · weight, and the weight's gradient in slices of columns: every row of grad is read once.
class LinearBackward {
 public:
  explicit LinearBackward(const Linear& p) : p_(p), parts_(p.rows) {}

  int run() const {
    const Matrix matrix = transposed(p_);
    Buffers buffers(ToPack::bytes(matrix) + parts_.count() * floats_of_part() * sizeof(float));
    if (!buffers.ok()) return 1;
    const ToPack weight[1] = {{matrix, buffers}};
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
        for (size_t i = 0; i < floats_of_part(); i += kLanes) store(memory + i, Vector{});
        parts_.for_each_chunk(part, [&](int64_t start, int64_t rows) {
          const float* grad = p_.grad + start * p_.columns;
          if (!first)
            product(grad, p_.columns, rows, packed,
                    Sink<float>{p_.dx + start * p_.inner, p_.inner, p_.inner});
          add_outer_products_of_any(grad + first, p_.columns, count, p_.x + start * p_.inner, p_.inner,
                                    p_.inner, rows, memory);
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

  size_t floats_of_part() const { return kColumnsAtOnce * p_.inner; }  // sums
};

}  // namespace

int VISION_TTT_KERNEL(linear)(const Linear& p) {
  const Matrix matrix = Matrix::of(p.weight, p.columns, p.inner);
  return multiply(p.x, matrix, p.bias, p.out, p.rows, p.threads);
}

int VISION_TTT_KERNEL(linear_backward)(const Linear& p) {
  const GradientTiles tiles{p.columns, p.inner};
  if (tiles.count() < kThreadsToServe) return LinearBackward(p).run();
  const int failed = multiply(p.grad, transposed(p), nullptr, p.dx, p.rows, p.threads);
  return failed ? failed : tiles.sum(p.grad, p.x, p.rows, p.dweight, p.threads);
}
