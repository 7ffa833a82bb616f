// Multi-scale deformable attention, for one instruction set. The build compiles this file once for each.
#include "backward.h"

namespace {

constexpr int kMost = VISION_TTT_MOST_POINTS;

// The levels' sizes for the points of several heads, L · P after L · P.
struct Sizes {
  float width[kMost], height[kMost];
  int32_t columns[kMost], rows[kMost], start[kMost];

  Sizes(const DeformableAttention& p, int64_t count) {
    int64_t start_of_level = 0;
    for (int64_t l = 0; l < p.levels; ++l) {
      const int64_t h = p.shapes[2 * l], w = p.shapes[2 * l + 1];
      for (int64_t first = l * p.points; first < count; first += p.levels * p.points)
        for (int64_t i = first; i < first + p.points; ++i) set(i, h, w, start_of_level);
      start_of_level += h * w;
    }
    for (int64_t i = count; i < kLanes; ++i) set(i, 1, 1, 0);
  }

 private:
  void set(int64_t i, int64_t h, int64_t w, int64_t start_of_level) {
    width[i] = float(w), height[i] = float(h);
    columns[i] = int32_t(w), rows[i] = int32_t(h), start[i] = int32_t(start_of_level);
  }
};

// The cells around the points of a query, and how much each counts.
struct Cells {
  int32_t token[4][kMost];
  float share[4][kMost];

  VISION_TTT_INLINE void locate(const Sizes& s, const float* locations, const float* weights, int64_t i) {
    const Pairs at(locations);
    const IntVector columns = load(s.columns + i);
    const Neighbours x(at.x, load(s.width + i), columns);
    const Neighbours y(at.y, load(s.height + i), load(s.rows + i));
    const Vector weight = load(weights);
    for (int r = 0; r < 2; ++r) {
      const IntVector row = load(s.start + i) + y.cell[r] * columns;
      const Vector share = weight * y.share[r];
      for (int c = 0; c < 2; ++c) {
        store(token[2 * r + c] + i, row + x.cell[c]);
        store(this->share[2 * r + c] + i, share * x.share[c]);
      }
    }
  }

  // Of `count` points. The last vector may overlap the one before it.
  VISION_TTT_INLINE void locate_all(const Sizes& s, const float* locations, const float* weights,
                                   int64_t count) {
    if (count < kLanes) {
      float few_locations[2 * kLanes] = {}, few_weights[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) {
        few_locations[2 * i] = locations[2 * i], few_locations[2 * i + 1] = locations[2 * i + 1];
        few_weights[i] = weights[i];
      }
      return locate(s, few_locations, few_weights, 0);
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t at = i + kLanes > count ? count - kLanes : i;
      locate(s, locations + 2 * at, weights + at, at);
    }
  }

  // `Vectors` vectors of one head's output, of its points [start, stop).
  template <int Vectors, class Number>
  VISION_TTT_INLINE void attend(const Number* value, int64_t row, int64_t start, int64_t stop,
                               Number* out) const {
    Vector total[2][Vectors] = {};  // two chains of additions hide the latency of one
    for (int64_t i = start; i < stop; ++i)
      for (int k = 0; k < 4; ++k) {
        const Number* cell = value + token[k][i] * row;
        const Vector factor = splat(share[k][i]);
        for (int v = 0; v < Vectors; ++v) total[k % 2][v] += factor * load(cell + v * kLanes);
      }
    for (int v = 0; v < Vectors; ++v) store(out + v * kLanes, total[0][v] + total[1][v]);
  }
};

template <class Number>
void forward(const DeformableAttention& p) {
  const int64_t per_head = p.levels * p.points;
  const int64_t most = kMost / per_head, group = most < p.heads ? most : p.heads;
  const Sizes sizes(p, group * per_head);
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < p.batch * p.queries; ++task) {
    const int64_t batch = task / p.queries, query = task % p.queries;
    const Number* value = static_cast<const Number*>(p.value) + batch * p.value_batch;
    Number* out = static_cast<Number*>(p.out) + batch * p.out_batch + query * p.out_query;
    Cells cells;
    for (int64_t first = 0; first < p.heads; first += group) {
      const int64_t heads = p.heads - first < group ? p.heads - first : group;
      const int64_t place = (task * p.heads + first) * per_head;
      cells.locate_all(sizes, p.locations + 2 * place, p.weights + place, heads * per_head);
      for (int64_t h = 0; h < heads; ++h) {
        const Number* of_head = value + (first + h) * p.value_head;
        Number* to = out + (first + h) * p.dim;
        const int64_t start = h * per_head, stop = start + per_head;
        int64_t c = 0;
        for (; c + 4 * kLanes <= p.dim; c += 4 * kLanes)
          cells.attend<4>(of_head + c, p.value_token, start, stop, to + c);
        for (; c + 2 * kLanes <= p.dim; c += 2 * kLanes)
          cells.attend<2>(of_head + c, p.value_token, start, stop, to + c);
        for (; c < p.dim; c += kLanes) cells.attend<1>(of_head + c, p.value_token, start, stop, to + c);
      }
    }
  }
}

template <class Number>
void backward(const DeformableAttention& p, const DeformableAttentionGradients& g) {
  const int64_t tasks = p.batch * p.heads * p.levels;
#pragma omp parallel for schedule(dynamic) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t level = task % p.levels, head = task / p.levels % p.heads;
    HeadOnLevel<Number>(p, g, task / p.levels / p.heads, head, level).run();
  }
}

}  // namespace

void VISION_TTT_KERNEL(deformable_attention)(const DeformableAttention& p) {
  p.is_bfloat16 ? forward<Bfloat16>(p) : forward<float>(p);
}

void VISION_TTT_KERNEL(deformable_attention_backward)(const DeformableAttention& p,
                                                      const DeformableAttentionGradients& g) {
  p.is_bfloat16 ? backward<Bfloat16>(p, g) : backward<float>(p, g);
}
