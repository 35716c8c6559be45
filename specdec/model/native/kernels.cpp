// One decoder step of a Llama-like model on CPUs with AVX2, in one call.
//
// Weights are bfloat16, everything else is float32. A row's result never depends on which
// rows stand beside it: every sum runs over the row's own operands in a fixed order, and a
// tree node reads exactly the keys that plain decoding would read, in the same order. Plain
// decoding, trees, chunked prefill and any batch therefore give the same bits.
//
// Compiled by build.py; -ffp-contract=off keeps the compiler from choosing roundings.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

// Packed weights: blocks of COLS outputs; per block and input one row of 8 words, each with
// output i in its low and output i + 8 in its high half.
constexpr long COLS = 16;
constexpr long PANEL = 96;  // rows that stay in the L2 cache while a block is used
constexpr long ROW_CHUNK = 8;  // rows of a sequence that attend together, at most

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

// MR rows times NB consecutive blocks of weights; k is summed from 0 up for every output.
template <int MR, int NB>
inline void tile(const float* x, long ldx, const uint32_t* w, long k, __m256 (&acc)[MR][NB][2]) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b) acc[i][b][0] = acc[i][b][1] = _mm256_setzero_ps();
  for (long p = 0; p < k; ++p) {
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b) {
      const __m256i pair =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + (b * k + p) * 8));
      // the more is computed per byte, the less the processor looks ahead by itself
      _mm_prefetch(reinterpret_cast<const char*>(w + (b * k + p) * 8) + (MR > 2 ? 4096 : 1024),
                   _MM_HINT_T0);
      const __m256 lo = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
      const __m256 hi = _mm256_castsi256_ps(_mm256_and_si256(pair, high));
#pragma GCC unroll 6
      for (int i = 0; i < MR; ++i) {
        const __m256 a = _mm256_broadcast_ss(x + i * ldx + p);
        acc[i][b][0] = _mm256_fmadd_ps(a, lo, acc[i][b][0]);
        acc[i][b][1] = _mm256_fmadd_ps(a, hi, acc[i][b][1]);
      }
    }
  }
}

}  // namespace

extern "C" {

// A linear layer: y = x W^T + bias.
struct Linear {
  const uint32_t* weight;  // [ceil(n / COLS), k, 8]
  const float* bias;       // [n] or null
  int64_t n, k;
};

struct Layer {
  const float* input_norm;      // [H]
  const float* post_norm;       // [H]
  const float* query_norm;      // [D] or null
  const float* key_norm;        // [D] or null
  Linear qkv, out, gate_up, down;
  float* keys;                  // [slots, KV, D]
  float* values;                // [slots, KV, D]
  int64_t window;               // 0: none
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden, heads, kv_heads, head_dim, inner;
  float eps, head_eps, scaling;
  const float* final_norm;      // [H]
  Linear lm_head;
};

// Rows [first, first + width) of the step belong to one sequence.
struct Segment {
  int64_t first, width, start;  // start: tokens of the sequence before the first row
  const int64_t* slots;         // [start + width]
  const uint8_t* visible;       // [width, width], or null for causal rows
};

struct Step {
  int64_t rows, segment_count, logit_count, threads;
  float* x;                     // [T, H] embeddings; changed
  const float* cos;             // [T, D]
  const float* sin;             // [T, D]
  const Segment* segments;
  const int64_t* row_segment;   // [T]
  const int64_t* logit_rows;    // [R]
  float* scratch;               // see scratch_floats
  float* hidden;                // [R, H]
  float* logits;                // [R, V]
};

}  // extern "C"

namespace {

// Stores MR x NB blocks; `add` adds to what is there (a residual).
template <int MR, int NB>
inline void linear_tile(const Linear& l, const float* x, long block, float* y, long ldy, bool add) {
  __m256 acc[MR][NB][2];
  tile<MR, NB>(x, l.k, l.weight + block * l.k * 8, l.k, acc);
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

// This thread's share of y[rows, n] (+)= x[rows, k] W^T + bias.
void linear_share(const Linear& l, const float* x, long rows, float* y, long ldy, bool add) {
  const long blocks = (l.n + COLS - 1) / COLS;
  const long threads = omp_get_num_threads(), me = omp_get_thread_num();
  const long from = blocks * me / threads, to = blocks * (me + 1) / threads;
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

// y = weight * x / sqrt(mean(x^2) + eps), n a multiple of 8.
void rms_norm(const float* x, const float* weight, float* y, long n, float eps) {
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
void rotate(float* x, const float* cos, const float* sin, long d) {
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
void weigh_all(const float* const* values, long count, const float* weights, long ldw, float* out,
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
float soften(float* scores, long count, long padded) {
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
void attend(const Model& m, const Layer& layer, const Segment& s, const Chunk& chunk, long head,
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

// Norms and rotates queries and keys of one row, and writes its keys and values to their slot.
void place(const Model& m, const Layer& layer, const Step& step, long row, float* qkv) {
  const long d = m.head_dim;
  const float *cos = step.cos + row * d, *sin = step.sin + row * d;
  for (long h = 0; h < m.heads + m.kv_heads; ++h) {
    float* x = qkv + h * d;
    const float* norm = h < m.heads ? layer.query_norm : layer.key_norm;
    if (norm) rms_norm(x, norm, x, d, m.head_eps);
    rotate(x, cos, sin, d);
  }
  const Segment& s = step.segments[step.row_segment[row]];
  const long at = s.slots[s.start + row - s.first] * m.kv_heads * d, bytes = m.kv_heads * d * 4;
  std::memcpy(layer.keys + at, qkv + m.heads * d, bytes);
  std::memcpy(layer.values + at, qkv + (m.heads + m.kv_heads) * d, bytes);
}

}  // namespace

extern "C" {

// Floats that one step of `rows` rows, `logit_rows` of them with logits, needs as scratch.
int64_t specdec_scratch_floats(const Model* m, int64_t rows) {
  const int64_t qkv = (m->heads + 2 * m->kv_heads) * m->head_dim;
  return rows * (m->hidden + qkv + m->heads * m->head_dim + 2 * m->inner + m->inner);
}

// y[rows, n] = x[rows, k] W^T + bias.
void specdec_linear(const Linear* l, const float* x, int64_t rows, float* y, int64_t threads) {
#pragma omp parallel num_threads(static_cast<int>(threads))
  linear_share(*l, x, rows, y, l->n, false);
}

// Runs all layers, the final norm and the output head.
void specdec_step(const Model* model, const Step* step) {
  const Model& m = *model;
  const Step& s = *step;
  const long rows = s.rows, h = m.hidden, d = m.head_dim, repeats = m.heads / m.kv_heads;
  const long qkv_width = (m.heads + 2 * m.kv_heads) * d, out_width = m.heads * d;
  float* normed = s.scratch;                // [T, H]
  float* qkv = normed + rows * h;           // [T, qkv_width]
  float* mixed = qkv + rows * qkv_width;    // [T, out_width]
  float* gates = mixed + rows * out_width;  // [T, 2 * inner]
  float* acted = gates + rows * 2 * m.inner;
  // few rows: one query head at a time, for an even share of the threads
  const bool few = rows * m.kv_heads < 2 * s.threads;
  const long per_item = few ? 1 : repeats, per_chunk = m.heads / per_item;
  const long together = std::clamp(rows * m.kv_heads / (2 * s.threads), 1L, ROW_CHUNK);
  std::vector<Chunk> chunks;
  for (long i = 0; i < s.segment_count; ++i) {
    const long end = s.segments[i].first + s.segments[i].width;
    for (long r = s.segments[i].first; r < end; r += together)
      chunks.push_back({i, r, std::min(r + together, end)});
  }
#pragma omp parallel num_threads(static_cast<int>(s.threads))
  {
    Workspace work;
    for (long l = 0; l < m.layer_count; ++l) {
      const Layer& layer = m.layers[l];
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r)
        rms_norm(s.x + r * h, layer.input_norm, normed + r * h, h, m.eps);
      linear_share(layer.qkv, normed, rows, qkv, qkv_width, false);
#pragma omp barrier
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r) place(m, layer, s, r, qkv + r * qkv_width);
#pragma omp for schedule(dynamic, 1)
      for (long item = 0; item < static_cast<long>(chunks.size()) * per_chunk; ++item) {
        const Chunk& chunk = chunks[item / per_chunk];
        attend(m, layer, s.segments[chunk.segment], chunk, item % per_chunk * per_item, per_item, qkv,
               qkv_width, mixed, out_width, work);
      }
      linear_share(layer.out, mixed, rows, s.x, h, true);
#pragma omp barrier
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r)
        rms_norm(s.x + r * h, layer.post_norm, normed + r * h, h, m.eps);
      linear_share(layer.gate_up, normed, rows, gates, 2 * m.inner, false);
#pragma omp barrier
#pragma omp for schedule(static)
      for (long i = 0; i < rows * (m.inner / 8); ++i) {
        const long r = i / (m.inner / 8), c = i % (m.inner / 8) * 8;
        const __m256 gate = _mm256_loadu_ps(gates + r * 2 * m.inner + c);
        const __m256 up = _mm256_loadu_ps(gates + r * 2 * m.inner + m.inner + c);
        const __m256 one = _mm256_set1_ps(1.0f);
        const __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), gate);
        const __m256 silu = _mm256_div_ps(gate, _mm256_add_ps(one, exp8(minus)));
        _mm256_storeu_ps(acted + r * m.inner + c, _mm256_mul_ps(silu, up));
      }
      linear_share(layer.down, acted, rows, s.x, h, true);
#pragma omp barrier
    }
#pragma omp for schedule(static)
    for (long r = 0; r < s.logit_count; ++r)
      rms_norm(s.x + s.logit_rows[r] * h, m.final_norm, s.hidden + r * h, h, m.eps);
    linear_share(m.lm_head, s.hidden, s.logit_count, s.logits, m.lm_head.n, false);
  }
}

}  // extern "C"
