// The processor's tile registers (AMX): eight of 16 rows of 64 bytes, and products of bfloat16 in them.
#pragma once

#include <type_traits>

#include "../bfloat16.h"

namespace {

// Whether the kernels of this instruction set have tile registers.
#ifdef __AMX_BF16__
#define VISION_TTT_TILES
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

constexpr int64_t kRowsOfTile = 16;
constexpr int64_t kInnerOfTile = 32;  // numbers of the inner axis that one instruction multiplies

}  // namespace

#ifdef VISION_TTT_TILES

namespace {

struct TileShape {
  int64_t rows, row_bytes;
};

// The tile registers of a thread have these shapes while this object lives.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShape (&shapes)[8]) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } registers = {};
    registers.palette = 1;
    for (int i = 0; i < 8; ++i) {
      registers.row_bytes[i] = uint16_t(shapes[i].row_bytes);
      registers.rows[i] = uint8_t(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(registers));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// The compiler's own functions do not say that they read memory, so that stores could move beyond them.
template <int T>
VISION_TTT_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
VISION_TTT_INLINE void load_tile(const void* first, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(first), "r"(row_bytes), "i"(T) : "memory");
}
// A tile of 16 rows, one after the other. Other memory may stay in registers.
template <int T>
VISION_TTT_INLINE void load_whole_tile(const Bfloat16* first) {
  struct Whole {
    Bfloat16 numbers[kRowsOfTile * kInnerOfTile];
  };
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(first), "r"(int64_t(64)), "i"(T),
               "m"(*reinterpret_cast<const Whole*>(first)));
}
template <int T>
VISION_TTT_INLINE void store_tile(void* first, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(first), "r"(row_bytes), "i"(T) : "memory");
}
// Tile S [rows, 16] += tile X [rows, 32] × tile W, 32 rows of 16 columns as 16 rows of pairs.
template <int S, int X, int W>
VISION_TTT_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
}

// Pairs (low, high) of bfloat16 numbers, one after the other.
VISION_TTT_INLINE void store_pairs(Bfloat16* p, Vector low, Vector high) {
  constexpr uint16_t kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
  const __m512i pairs = _mm512_permutexvar_epi16(_mm512_loadu_si512(kOrder),
                                                 reinterpret_cast<__m512i>(both));
  std::memcpy(p, &pairs, sizeof pairs);
}
// The other way round: the first numbers of 16 pairs, then the second ones.
VISION_TTT_INLINE void split_pairs(const Bfloat16* pairs, Bfloat16* p) {
  constexpr uint16_t kOrder[] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i both = _mm512_permutexvar_epi16(_mm512_loadu_si512(kOrder), _mm512_loadu_si512(pairs));
  std::memcpy(p, &both, sizeof both);
}

// Call f with the constants 0 to N - 1.
template <int N, class F>
VISION_TTT_INLINE void for_constants(const F& f) {
  if constexpr (N > 0) {
    for_constants<N - 1>(f);
    f(std::integral_constant<int, N - 1>{});
  }
}

}  // namespace

#endif
