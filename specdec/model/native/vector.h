// Small vector functions: sums, e^x, norms, rotation, dot products.

#pragma once

#include <immintrin.h>

#include <cmath>

namespace specdec {

inline float sum8(__m256 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}

// e^x by 2^n * p(r), r = x - n ln 2 in [-ln2/2, ln2/2], Taylor to degree 7. NaN stays NaN.
inline __m256 exp8(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-87.3f), x);  // the second operand wins where it is NaN
  x = _mm256_min_ps(_mm256_set1_ps(88.3f), x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  const __m256i exponent = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

inline __m256 silu8(__m256 x) {
  const __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), x);
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(minus)));
}

// y = weight * x / sqrt(mean(x^2) + eps), n a multiple of 8.
inline void rms_norm(const float* x, const float* weight, float* y, long n, float eps) {
  __m256 squares = _mm256_setzero_ps();
  for (long i = 0; i < n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    squares = _mm256_fmadd_ps(v, v, squares);
  }
  const __m256 scale = _mm256_set1_ps(1.0f / std::sqrt(sum8(squares) / n + eps));
  for (long i = 0; i < n; i += 8)
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(weight + i),
                                          _mm256_mul_ps(_mm256_loadu_ps(x + i), scale)));
}

// Rotary embedding of one head: x cos + rotate_half(x) sin. D is a multiple of 16.
inline void rotate(float* x, const float* cos, const float* sin, long d) {
  const long half = d / 2;
  for (long i = 0; i < half; i += 8) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + half + i);
    const __m256 first = _mm256_sub_ps(_mm256_mul_ps(a, _mm256_loadu_ps(cos + i)),
                                       _mm256_mul_ps(b, _mm256_loadu_ps(sin + i)));
    const __m256 second = _mm256_add_ps(_mm256_mul_ps(b, _mm256_loadu_ps(cos + half + i)),
                                        _mm256_mul_ps(a, _mm256_loadu_ps(sin + half + i)));
    _mm256_storeu_ps(x + i, first);
    _mm256_storeu_ps(x + half + i, second);
  }
}

// Eight dot products of one query with eight keys.
inline __m256 dot8(const float* query, const float* const* keys, long d) {
  __m256 acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = _mm256_setzero_ps();
  for (long e = 0; e < d; e += 8) {
    const __m256 q = _mm256_loadu_ps(query + e);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i] = _mm256_fmadd_ps(q, _mm256_loadu_ps(keys[i] + e), acc[i]);
  }
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
  const __m256 high =
      _mm256_hadd_ps(_mm256_hadd_ps(acc[4], acc[5]), _mm256_hadd_ps(acc[6], acc[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                       _mm256_permute2f128_ps(low, high, 0x31));
}

}  // namespace specdec
