// The forward pass of ttt_linear with its products in tile registers: their factors are rounded to
// bfloat16, while the state, its sums and the norms are float32.
#pragma once

#include "../scans/learner/run_heads.h"
#include "../scans/ttt_linear/forward.h"
#include "tiles.h"

namespace {

#ifdef VISION_TTT_TILES

// A mini-batch is a tile of rows; smaller ones are filled up with zeros.
constexpr int64_t kMiniBatchOfTile = kRowsOfTile;

template <int D>
struct LearnerInTiles : Learner<D> {
  Bfloat16* pairs;  // W as panels [D / 16, D / 2, 16, 2]
};

// The roles of the tile registers. The last two hold products over the mini-batch's tokens.
constexpr int kSums = 0, kRows = 4, kColumns = 5, kRowsOfTokens = 6, kColumnsOfTokens = 7;

template <int D>
class MiniBatchInTiles : Views<D> {
  using Views<D>::n, Views<D>::k, Views<D>::q, Views<D>::v, Views<D>::v_copy, Views<D>::eta, Views<D>::raw;
  using Views<D>::attention;

  static constexpr int kPanels = D / kRowsOfTile;
  static constexpr int kAtOnce = kPanels < 4 ? kPanels : 4;  // panels of sums in registers
  static constexpr int64_t kBytes = D * sizeof(float);       // of a row of floats

  float *z, *step;                  // [16, D]; the steps replace the labels
  float* change;                    // of W, [2, 16, D], in place of k and q
  Bfloat16 *rounded, *k_pairs;      // k or q [16, D]; Kᵀ as [D / 2, 16, 2]
  Bfloat16 *k_columns, *seen;       // Kᵀ [D, 16]; -p A [16, 16], zero above the diagonal
  Bfloat16* step_pairs;             // G as panels [D / 16, 8, 16, 2]

 public:
  using Views<D>::taps;
  static constexpr int64_t kAsks = 3 + kPanels;  // for rows ahead

  static size_t floats(const Problem& p) {
    return Views<D>::floats(p) + (16 + 8 + 2 * 8 + 8) * D + 16 * 8 + 8 * 16;
  }
  void allocate(Scratch& scratch, const Problem& p) {
    Views<D>::allocate(scratch, p);
    z = scratch.take(16 * D);
    for (Bfloat16** piece : {&rounded, &k_pairs, &k_columns, &step_pairs}) *piece = scratch.take<Bfloat16>(16 * D);
    seen = scratch.take<Bfloat16>(16 * 16);
    // What is not needed at the same time shares memory, so that all of it and W fit the first cache level.
    step = v_copy, change = k;
    if (p.taps + 15 <= 40) raw = z;  // [taps + 15, D] in place of what was taken before step_pairs
  }

  static TileRegisters registers() {
    const TileShape whole{16, 64}, rows_of_tokens{16, 32}, columns_of_tokens{8, 64};
    return TileRegisters({whole, whole, whole, whole, whole, whole, rows_of_tokens, columns_of_tokens});
  }

  // W as pairs of its rows.
  static void round_state(const float* w, Bfloat16* pairs) {
    for (int64_t i = 0; i < D; i += 2)
      for (int j = 0; j < kPanels; ++j)
        store_pairs(pairs + (j * D + i) * 16, load(w + i * D + j * 16), load(w + (i + 1) * D + j * 16));
  }

  void run(const Head& head, int64_t start, int64_t count, const LearnerInTiles<D>& learner,
           const Tokens& out, RowsAhead<D>& ahead) {
    const float p_last = head.scale(count - 1);
    taps = learner.taps;
    load_views(head, start, count);
    ahead.ask();
    round_rows(k);
    turn_keys();
    product<false>(learner);
    inner_gradients<D>(16, z, k, v, eta, head.norm(), step);
    for (int64_t t = 0; t < 16; t += 2)
      for (int j = 0; j < kPanels; ++j)
        store_pairs(step_pairs + (j * 8 + t / 2) * 32, load(step + t * D + j * 16),
                    load(step + (t + 1) * D + j * 16));
    ahead.ask();
    round_rows(q);
    attend(head);
    product<true>(learner);
    inner_outputs<D>(n, q, z, head.norm(), {z, D});
    for (int64_t t = 0; t < n; ++t) {
      const Scan& scan = head.scan;
      Bfloat16* to = static_cast<Bfloat16*>(out.data) + scan.batch * out.batch +
                     scan.token(start + t) * out.token + scan.head * out.head;
      for (int i = 0; i < D; i += kLanes) store(to + i, load(z + t * D + i));
    }
    ahead.ask();
    update(p_last, learner, ahead);
  }

 private:
  void load_views(const Head& head, int64_t start, int64_t count) {
    this->load_training(head, start, count);
    // Tokens that are not there have the rate 0, hence no step.
    q = k + 16 * D;
    std::memset(k + n * D, 0, (16 - n) * kBytes);
    std::memset(v_copy + n * D, 0, (16 - n) * kBytes);
    std::memset(eta + n, 0, (16 - n) * sizeof(float));
    if (head.p.q.data == head.p.k.data && taps.q && taps.k) {  // then `raw` holds the tokens of q
      if (head.p.taps == 4)
        convolve_rows<D, 4>(raw, taps.q, 4, n, q);
      else
        convolve_rows<D, 0>(raw, taps.q, head.p.taps, n, q);
    } else {
      this->load_queries(head, start);
    }
  }

  void round_rows(const float* rows) {
    for (int64_t i = 0; i < n * D; i += kLanes) store(rounded + i, load(rows + i));
    std::memset(rounded + n * D, 0, (16 - n) * D * sizeof(Bfloat16));
  }

  // Kᵀ in both forms, by pairs of numbers as if they were floats.
  void turn_keys() {
    for (int64_t i = 0; i < D / 2; i += 16)
      transpose_square(reinterpret_cast<const float*>(rounded) + i, D / 2,
                       reinterpret_cast<float*>(k_pairs) + i * 16, 16);
    for (int64_t i = 0; i < D / 2; ++i) split_pairs(k_pairs + i * 32, k_columns + i * 32);
  }

  // -p times the lower triangle of Q Kᵀ + 1.
  void attend(const Head& head) {
    clear_tile<kSums>();
    for (int64_t i = 0; i < D; i += kInnerOfTile) {
      load_tile<kRows>(rounded + i, D * sizeof(Bfloat16));
      load_tile<kColumns>(k_pairs + i * 16, 64);
      multiply_tiles<kSums, kRows, kColumns>();
    }
    store_tile<kSums>(attention, 64);
    for (int64_t t = 0; t < 16; ++t) {
      const float minus_p = t < n ? -head.scale(t) : 0.0f;
      store(seen + t * 16, keep_first((load(attention + t * 16) + 1.0f) * minus_p, t + 1));
    }
  }

  // z = x W + b, for queries plus what they see of the steps.
  template <bool kIsQuery>
  void product(const LearnerInTiles<D>& learner) {
    for (int first = 0; first < kPanels; first += kAtOnce) {
      for_constants<kAtOnce>([&](auto j) { load_tile<kSums + j>(learner.b + (first + j) * 16, 0); });
      for (int64_t i = 0; i < D; i += kInnerOfTile) {
        load_tile<kRows>(rounded + i, D * sizeof(Bfloat16));
        for_constants<kAtOnce>([&](auto j) {
          load_tile<kColumns>(learner.pairs + ((first + j) * D + i) * 16, 64);
          multiply_tiles<kSums + j, kRows, kColumns>();
        });
      }
      if constexpr (kIsQuery) {
        load_tile<kRowsOfTokens>(seen, 32);
        for_constants<kAtOnce>([&](auto j) {
          load_tile<kColumnsOfTokens>(step_pairs + (first + j) * 8 * 32, 64);
          multiply_tiles<kSums + j, kRowsOfTokens, kColumnsOfTokens>();
        });
      }
      for_constants<kAtOnce>([&](auto j) { store_tile<kSums + j>(z + (first + j) * 16, kBytes); });
    }
  }

  // W ← W - p_n Kᵀ G, b ← b - p_n Σ G.
  void update(float p_last, const LearnerInTiles<D>& learner, RowsAhead<D>& ahead) {
    for (int j = 0; j < kPanels; ++j) {
      Vector total{};
      for (int64_t t = 0; t < n; ++t) total += load(step + t * D + j * 16);
      store(learner.b + j * 16, load(learner.b + j * 16) - total * p_last);
    }
    // While some rows of W change, the changes of the next ones are multiplied.
    multiply_changes(0);
    for (int r = 0; r < kPanels; ++r) {
      ahead.ask();
      if (r + 1 < kPanels) multiply_changes(r + 1);
      const float* by = changes(r);
      float* w = learner.w + r * 16 * D;
      for (int64_t i = 0; i < 16; i += 2)
        for (int j = 0; j < kPanels; ++j) {
          const int64_t at = i * D + j * 16;
          const Vector low = load(w + at) - load(by + at) * p_last;
          const Vector high = load(w + at + D) - load(by + at + D) * p_last;
          store(w + at, low), store(w + at + D, high);
          store_pairs(learner.pairs + (j * D + r * 16 + i) * 16, low, high);
        }
    }
  }

  // 16 rows of Kᵀ G.
  void multiply_changes(int r) {
    load_tile<kRowsOfTokens>(k_columns + r * 16 * 16, 32);
    for (int first = 0; first < kPanels; first += kAtOnce)
      for_constants<kAtOnce>([&](auto j) {
        clear_tile<kSums + j>();
        load_tile<kColumnsOfTokens>(step_pairs + (first + j) * 8 * 32, 64);
        multiply_tiles<kSums + j, kRowsOfTokens, kColumnsOfTokens>();
        store_tile<kSums + j>(changes(r) + (first + j) * 16, kBytes);
      });
  }
  float* changes(int r) { return change + r % 2 * 16 * D; }
};

// Whether the call may be computed so.
inline bool fits_tiles(const Problem& p, const Outputs& out) {
  return p.rounds && p.is_bfloat16 && p.dim % kInnerOfTile == 0 &&
         p.mini_batch_size <= kMiniBatchOfTile && !out.kept.w1;
}

template <int D>
size_t floats_in_tiles(const Problem& p) {
  return MiniBatchInTiles<D>::floats(p) +
         kHeadsTogether<D> * (D * D + D + D * D / 2 + Taps<D>::floats(p) + 5 * 16);
}

template <int D>
void forward_heads_in_tiles(const Heads& heads, const Outputs& out, Scratch& scratch) {
  const Problem& p = heads.p;
  MiniBatchInTiles<D> batch;
  batch.allocate(scratch, p);
  LearnerInTiles<D> learners[kHeadsTogether<D>];
  for (int64_t i = 0; i < heads.count; ++i) {
    LearnerInTiles<D>& learner = learners[i];
    static_cast<Learner<D>&>(learner) = initial_learner<D>(heads[i], scratch);
    learner.pairs = scratch.take<Bfloat16>(D * D);
    MiniBatchInTiles<D>::round_state(learner.w, learner.pairs);
  }
  const TileRegisters registers = MiniBatchInTiles<D>::registers();
  for_each_mini_batch<D>(heads, out, MiniBatchInTiles<D>::kAsks, [&](int64_t i, int64_t number, auto& ahead) {
    const Head head = heads[i];
    batch.run(head, number * p.mini_batch_size, head.size(number), learners[i], out.o, ahead);
  });
  store_states<D>(heads, out, learners);
}

template <int D>
struct ForwardInTiles {
  using Tensors = Outputs;
  static constexpr int64_t kHeads = kHeadsTogether<D>;
  static size_t floats(const Problem& p) { return floats_in_tiles<D>(p); }
  static void run(const Heads& h, const Outputs& t, Scratch& s) { forward_heads_in_tiles<D>(h, t, s); }
};

#endif

// Run the forward pass in tile registers where these serve, otherwise Forward<D>.
template <template <int> class Forward>
int run_forward(const Problem& p, const Outputs& out) {
#ifdef VISION_TTT_TILES
  if (fits_tiles(p, out)) return run<ForwardInTiles>(p, out);
#endif
  return run<Forward>(p, out);
}

}  // namespace
