// Linear layers with weights in bfloat16 and arithmetic in float32.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "packing.h"
#include "tiles.h"

namespace specdec {

constexpr long PANEL = 96;  // rows that stay in the L2 cache while a block is used

// MR rows times NB consecutive blocks of weights; k is summed from 0 up for every output.
template <int MR, int NB>
inline void tile(const float* x, long ldx, const uint32_t* w, long k, __m256 (&acc)[MR][NB][2]) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const long pairs = (k + 1) / 2;
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b) acc[i][b][0] = acc[i][b][1] = _mm256_setzero_ps();
  const auto add = [&](long p, int b, __m256 first, __m256 second) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) {
      const __m256 a = _mm256_broadcast_ss(x + i * ldx + p);
      acc[i][b][0] = _mm256_fmadd_ps(a, first, acc[i][b][0]);
      acc[i][b][1] = _mm256_fmadd_ps(a, second, acc[i][b][1]);
    }
  };
  for (long p = 0; p < pairs; ++p) {
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b) {
      const auto* row = reinterpret_cast<const __m256i*>(w + (b * pairs + p) * COLS);
      // the more is computed per byte, the less the processor looks ahead by itself
      _mm_prefetch(reinterpret_cast<const char*>(row) + (MR > 2 ? 4096 : 1024), _MM_HINT_T0);
      const __m256i left = _mm256_loadu_si256(row), right = _mm256_loadu_si256(row + 1);
      add(2 * p, b, _mm256_castsi256_ps(_mm256_slli_epi32(left, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(right, 16)));
      if (2 * p + 1 < k)
        add(2 * p + 1, b, _mm256_castsi256_ps(_mm256_and_si256(left, high)),
            _mm256_castsi256_ps(_mm256_and_si256(right, high)));
    }
  }
}

// Stores MR x NB blocks; `add` adds to what is there (a residual).
template <int MR, int NB>
inline void linear_tile(const Linear& l, const float* x, long block, float* y, long ldy, bool add) {
  __m256 acc[MR][NB][2];
  tile<MR, NB>(x, l.k, l.weight + block * ((l.k + 1) / 2) * COLS, l.k, acc);
#pragma GCC unroll 2
  for (int b = 0; b < NB; ++b) {
    const long column = (block + b) * COLS;
    const bool whole = column + COLS <= l.n;
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) {
      float* to = y + i * ldy + column;
      if (whole) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          __m256 v = acc[i][b][h];
          if (l.bias) v = _mm256_add_ps(v, _mm256_loadu_ps(l.bias + column + 8 * h));
          if (add) v = _mm256_add_ps(_mm256_loadu_ps(to + 8 * h), v);
          _mm256_storeu_ps(to + 8 * h, v);
        }
      } else {
        alignas(32) float part[COLS];
        _mm256_store_ps(part, acc[i][b][0]);
        _mm256_store_ps(part + 8, acc[i][b][1]);
        for (long c = 0; c < l.n - column; ++c) {
          const float v = part[c] + (l.bias ? l.bias[column + c] : 0.0f);
          to[c] = add ? to[c] + v : v;
        }
      }
    }
  }
}

// This thread's share of y[rows, n] (+)= x[rows, k] W^T + bias. Where the layer is tiled, `split`
// holds the rows of x.
inline void linear_share(const Linear& l, const float* x, const Split& split, long rows, float* y,
                         long ldy, bool add) {
  const long blocks = (l.n + COLS - 1) / COLS;
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  const long from = blocks * me / threads, to = blocks * (me + 1) / threads;
  if (tiled(l)) {
    tile_blocks(l, split, from, to, y, ldy, add);
    return;
  }
  for (long top = 0; top < rows; top += PANEL) {
    const long bottom = std::min(rows, top + PANEL);
    for (long block = from; block < to; block += 2) {
      const bool two = block + 1 < to;
      for (long r = top; r < bottom;) {
        const float* a = x + r * l.k;
        float* out = y + r * ldy;
#define TALL(MR)                                        \
  linear_tile<MR, 1>(l, a, block, out, ldy, add);       \
  if (two) linear_tile<MR, 1>(l, a, block + 1, out, ldy, add); \
  r += MR;                                              \
  break
#define FLAT(MR)                                        \
  if (two) linear_tile<MR, 2>(l, a, block, out, ldy, add); \
  else linear_tile<MR, 1>(l, a, block, out, ldy, add);  \
  r += MR;                                              \
  break
        switch (std::min<long>(bottom - r, 6)) {
          case 6: TALL(6);
          case 5: TALL(5);
          case 4: TALL(4);
          case 3: FLAT(3);
          case 2: FLAT(2);
          default: FLAT(1);
        }
#undef TALL
#undef FLAT
      }
    }
  }
}

}  // namespace specdec
