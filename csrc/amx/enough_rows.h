// From how many rows on float32 products are made in tile registers.
#pragma once

#include <cstdint>

namespace {

// Fewer do not pay for splitting the weights at a call.
constexpr int64_t kRowsForTiles = 256;

}  // namespace
