// Output rows in 8 bits, for drafting: candidates need no exact logits, and reading the rows is
// most of what drafting costs.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace specdec {

constexpr long BYTE_BLOCK = 8;

// y = x W^T, row o of W as scale[o] times whole numbers from -127 to 127.
struct ByteRows {
  const int8_t* weight;  // [ceil(n / 8), k / 2, 8, 2]
  const float* scale;    // [n]
  int64_t n, k;          // k is even
};

// x as scale times whole 16-bit numbers, small enough that no sum overflows 32 bits.
// Returns the scale; NaN if x is not finite.
inline float to_words(const float* x, long k, int16_t* words) {
  float top = 0.0f, spoiled = 0.0f;
  for (long i = 0; i < k; ++i) {
    top = std::max(top, std::fabs(x[i]));
    spoiled += x[i] - x[i];
  }
  if (!(spoiled == 0.0f)) {
    std::fill_n(words, k, int16_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float most =
      static_cast<float>(std::min<int64_t>(32767, std::numeric_limits<int32_t>::max() / (127 * k)));
  const float factor = top > 0.0f ? most / top : 0.0f;
  for (long i = 0; i < k; ++i) words[i] = static_cast<int16_t>(std::lrintf(x[i] * factor));
  return top / most;
}

template <int MR, int NB>
inline void byte_tile(const ByteRows& b, const int16_t* words, const float* scales, long block,
                      float* y, long ldy) {
  const long pairs = b.k / 2;
  __m256i acc[MR][NB];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < NB; ++c) acc[i][c] = _mm256_setzero_si256();
  for (long p = 0; p < pairs; ++p) {
#pragma GCC unroll 4
    for (int c = 0; c < NB; ++c) {
      const int8_t* at = b.weight + ((block + c) * pairs + p) * 2 * BYTE_BLOCK;
      _mm_prefetch(reinterpret_cast<const char*>(at) + 1024, _MM_HINT_T0);
      const __m256i w =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) {
        const __m256i a = _mm256_set1_epi32(reinterpret_cast<const int32_t*>(words + i * b.k)[p]);
        acc[i][c] = _mm256_add_epi32(acc[i][c], _mm256_madd_epi16(w, a));
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < NB; ++c) {
    const long first = (block + c) * BYTE_BLOCK;
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      alignas(32) float sums[BYTE_BLOCK];
      _mm256_store_ps(sums, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[i][c]),
                                          _mm256_set1_ps(scales[i])));
      for (long o = 0; o < std::min(BYTE_BLOCK, b.n - first); ++o)
        y[i * ldy + first + o] = sums[o] * b.scale[first + o];
    }
  }
}

// This thread's share of y[rows, n] = x W^T, x as words [rows, k] with their scales.
inline void byte_share(const ByteRows& b, const int16_t* words, const float* scales, long rows,
                       float* y) {
  const long blocks = (b.n + BYTE_BLOCK - 1) / BYTE_BLOCK;
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  const long to = blocks * (me + 1) / threads;
  for (long block = blocks * me / threads; block < to;) {
    const bool four = block + 4 <= to;
    for (long r = 0; r < rows;) {
      const int16_t* a = words + r * b.k;
      float* out = y + r * b.n;
      const long left = rows - r;
#define BYTES(MR)                                                   \
  if (four) {                                                       \
    byte_tile<MR, 2>(b, a, scales + r, block, out, b.n);            \
    byte_tile<MR, 2>(b, a, scales + r, block + 2, out, b.n);        \
  } else {                                                          \
    byte_tile<MR, 1>(b, a, scales + r, block, out, b.n);            \
  }                                                                 \
  r += MR
      if (left >= 4) {
        BYTES(4);
      } else if (left >= 2) {
        BYTES(2);
      } else if (four) {
        byte_tile<1, 4>(b, a, scales + r, block, out, b.n);
        r += 1;
      } else {
        BYTES(1);
      }
#undef BYTES
    }
    block += four ? 4 : 1;
  }
}

}  // namespace specdec
