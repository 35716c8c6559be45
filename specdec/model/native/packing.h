// How the weights of linear layers lie in memory; native/linear.py packs them.

#pragma once

#include <cstdint>

namespace specdec {

// Blocks of COLS outputs; per block and pair of inputs one row of 16 words, one an output, the
// earlier input's weight in the low half: 32 inputs of a block are a tile of AMX.
constexpr long COLS = 16;

// A linear layer: y = x W^T + bias.
struct Linear {
  const uint32_t* weight;  // [ceil(n / COLS), ceil(k / 2), COLS]
  const float* bias;       // [n] or null
  int64_t n, k;
};

}  // namespace specdec
