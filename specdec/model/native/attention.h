// Attention of packed rows over KV slots, under causal or tree masks.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "model.h"
#include "vector.h"

namespace specdec {

constexpr long ROW_CHUNK = 8;  // rows of a sequence that attend together, at most

// out[q][offset..) += sum over keys of weights[q][j] * value_j, for QC queries and 8 * VC elements.
template <int QC, int VC>
inline void weigh(const float* const* values, long offset, long count, const float* weights,
                  long ldw, float* out, long ldo) {
  __m256 acc[QC][VC];
#pragma GCC unroll 4
  for (int q = 0; q < QC; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < VC; ++v) acc[q][v] = _mm256_loadu_ps(out + q * ldo + offset + 8 * v);
  for (long j = 0; j < count; ++j) {
    const float* value = values[j] + offset;
#pragma GCC unroll 4
    for (int v = 0; v < VC; ++v) {
      const __m256 part = _mm256_loadu_ps(value + 8 * v);
#pragma GCC unroll 4
      for (int q = 0; q < QC; ++q)
        acc[q][v] = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + q * ldw + j), part, acc[q][v]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < QC; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < VC; ++v) _mm256_storeu_ps(out + q * ldo + offset + 8 * v, acc[q][v]);
}

template <int QC>
void weigh_wide(const float* const* values, long count, const float* weights, long ldw, float* out,
                long d) {
  long offset = 0;
  for (; offset + 32 <= d; offset += 32)
    weigh<QC, 4>(values, offset, count, weights, ldw, out, d);
  for (; offset < d; offset += 8) weigh<QC, 1>(values, offset, count, weights, ldw, out, d);
}

// The same for any number of queries, whose weights and results stand in rows.
inline void weigh_all(const float* const* values, long count, const float* weights, long ldw, float* out,
               long d, long queries) {
  for (long q = 0; q < queries;) {
    const float* w = weights + q * ldw;
    switch (std::min(queries - q, 3L)) {
      case 3: weigh_wide<3>(values, count, w, ldw, out + q * d, d); q += 3; break;
      case 2: weigh_wide<2>(values, count, w, ldw, out + q * d, d); q += 2; break;
      default: weigh_wide<1>(values, count, w, ldw, out + q * d, d); q += 1;
    }
  }
}

// Scores become weights, not yet divided by their sum; returns 1 / sum. What pads is 0.
inline float soften(float* scores, long count, long padded) {
  float top = scores[0];
  for (long j = 1; j < count; ++j) top = scores[j] > top ? scores[j] : top;
  const __m256 shift = _mm256_set1_ps(top);
  __m256 sum = _mm256_setzero_ps();
  for (long j = count; j < padded; ++j) scores[j] = top;
  for (long j = 0; j < padded; j += 8) {
    __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j), shift));
    if (j + 8 > count) {
      alignas(32) float part[8];
      _mm256_store_ps(part, e);
      for (long i = count - j; i < 8; ++i) part[i] = 0.0f;
      e = _mm256_load_ps(part);
    }
    sum = _mm256_add_ps(sum, e);
    _mm256_storeu_ps(scores + j, e);
  }
  return 1.0f / sum8(sum);
}

// Consecutive rows of one segment that attend together, so that keys are read once for all.
struct Chunk {
  long segment, first, last;  // rows [first, last) of the step
};

// What one thread attends with; it grows, and is kept for the whole step.
struct Workspace {
  std::vector<const float*> keys, values;          // of the tokens that all rows see
  std::vector<const float*> own_keys, own_values;  // per row [width + 8], of the others it sees
  std::vector<long> own;                           // per row how many
  std::vector<float> scores, sums;                 // per row and query
};

constexpr long KEY_BLOCK = 64;  // values of so many tokens stay in the L1 cache

// Attention of the query heads [head, head + queries) of a chunk's rows over one KV head.
//
// Per row the tokens stand in the order of their positions (context, then ancestors), as they
// would in plain decoding, whatever stands beside them in the tree or in the step.
inline void attend(const Model& m, const Layer& layer, const Segment& s, const Chunk& chunk, long head,
            long queries, const float* qkv, long qkv_width, float* mixed, long mixed_width,
            Workspace& w) {
  const long d = m.head_dim, stride = m.kv_heads * d, kv_head = head / (m.heads / m.kv_heads);
  const long rows = chunk.last - chunk.first, own_ld = s.width + 8;
  // all rows of a causal chunk see what stands before its first one
  const long shared = s.start + (s.visible ? 0 : chunk.first - s.first);
  const long ld = (shared + s.width + 7) / 8 * 8 + 8;
  const auto at = [&](long index) { return s.slots[index] * stride + kv_head * d; };
  const auto query = [&](long r, long q) {
    return qkv + (chunk.first + r) * qkv_width + (head + q) * d;
  };
  const auto scores = [&](long r, long q) { return w.scores.data() + (r * queries + q) * ld; };
  const auto out = [&](long r) { return mixed + (chunk.first + r) * mixed_width + head * d; };
  const __m256 scaling = _mm256_set1_ps(m.scaling);
  // scores of eight tokens; where fewer are left, the last ones are written over or never read
  const auto score = [&](long r, long q, const float* const* keys, long to) {
    _mm256_storeu_ps(scores(r, q) + to, _mm256_mul_ps(dot8(query(r, q), keys, d), scaling));
  };

  w.keys.resize(shared + 8);
  w.values.resize(shared + 8);
  for (long j = 0; j < shared; ++j) {
    w.keys[j] = layer.keys + at(j);
    w.values[j] = layer.values + at(j);
  }
  for (long j = shared; shared && j < shared + 8; ++j) w.keys[j] = w.keys[shared - 1];
  w.own.assign(rows, 0);
  w.own_keys.resize(rows * own_ld);
  w.own_values.resize(rows * own_ld);
  for (long r = 0; r < rows; ++r) {
    const long inside = chunk.first + r - s.first;
    const float **keys = w.own_keys.data() + r * own_ld, **values = w.own_values.data() + r * own_ld;
    long& own = w.own[r];
    for (long node = shared - s.start; node <= inside; ++node) {
      if (s.visible && !s.visible[inside * s.width + node]) continue;
      keys[own] = layer.keys + at(s.start + node);
      values[own++] = layer.values + at(s.start + node);
    }
    for (long j = own; j < own + 7; ++j) keys[j] = keys[own - 1];  // a row sees itself: own > 0
  }

  w.scores.resize(rows * queries * ld);
  w.sums.resize(rows * queries);
  for (long j = 0; j < shared; j += 8)
    for (long r = 0; r < rows; ++r)
      for (long q = 0; q < queries; ++q) score(r, q, w.keys.data() + j, j);
  for (long r = 0; r < rows; ++r) {
    const long count = shared + w.own[r];
    const long first = layer.window > 0 ? std::max(0L, count - layer.window) : 0;
    for (long q = 0; q < queries; ++q) {
      for (long j = 0; j < w.own[r]; j += 8)
        score(r, q, w.own_keys.data() + r * own_ld + j, shared + j);
      // Sums begin at a window's first token. What is left behind the last one is 0, and so
      // is the weight of the tokens before the window.
      float* line = scores(r, q);
      if (first) std::memmove(line, line + first, (count - first) * sizeof(float));
      w.sums[r * queries + q] = soften(line, count - first, (count - first + 7) / 8 * 8);
      if (first) {
        std::memmove(line + first, line, (count - first) * sizeof(float));
        std::fill_n(line, first, 0.0f);
      }
    }
  }

  for (long r = 0; r < rows; ++r) std::fill_n(out(r), queries * d, 0.0f);
  for (long j = 0; j < shared; j += KEY_BLOCK)
    for (long r = 0; r < rows; ++r)
      weigh_all(w.values.data() + j, std::min(KEY_BLOCK, shared - j), scores(r, 0) + j, ld, out(r), d,
                queries);
  for (long r = 0; r < rows; ++r) {
    weigh_all(w.own_values.data() + r * own_ld, w.own[r], scores(r, 0) + shared, ld, out(r), d,
              queries);
    for (long q = 0; q < queries; ++q) {
      const __m256 inverse = _mm256_set1_ps(w.sums[r * queries + q]);
      for (float* x = out(r) + q * d; x < out(r) + (q + 1) * d; x += 8)
        _mm256_storeu_ps(x, _mm256_mul_ps(_mm256_loadu_ps(x), inverse));
    }
  }
}

}  // namespace specdec
