// One decoder step of a Llama-like model on CPUs with AVX2, in one call.
//
// Weights are bfloat16, everything else is float32 (where tiles.h computes, what linear layers read
// is rounded to 16 bits of mantissa). A row's result never depends on which
// rows stand beside it: every sum runs over the row's own operands in a fixed order, and a
// tree node reads exactly the keys that plain decoding would read, in the same order. Plain
// decoding, trees, chunked prefill and any batch therefore give the same bits.
//
// Compiled by build.py; -ffp-contract=off keeps the compiler from choosing roundings.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "model.h"
#include "vector.h"

namespace specdec {
namespace {

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
}  // namespace specdec

using namespace specdec;

extern "C" {

// Floats that one step of `rows` rows, `logit_rows` of them with logits, needs as scratch.
int64_t specdec_scratch_floats(const Model* m, int64_t rows) {
  const int64_t qkv = (m->heads + 2 * m->kv_heads) * m->head_dim;
  const int64_t attended = m->heads * m->head_dim;
  const int64_t longest = std::max({m->hidden, attended, m->inner});  // of what is split
  return split_floats(rows, longest) +
         rows * (m->hidden + qkv + attended + 2 * m->inner + m->inner);
}

// Computes linear layers by tiles from now on, where the processor has them and `wanted` is not 0.
void specdec_use_tiles(int64_t wanted) {
  static const bool there = tiles_there();
  tiles_on = wanted && there;
}

// 1 where they are.
int64_t specdec_tiles_used() { return tiles_on; }

// y[rows, n] = x[rows, k] W^T + bias.
void specdec_linear(const Linear* l, const float* x, int64_t rows, float* y, int64_t threads) {
  std::unique_ptr<void, decltype(&std::free)> room(nullptr, &std::free);
  if (tiled(*l)) room.reset(std::aligned_alloc(64, split_floats(rows, l->k) * 4));
  const Split split{static_cast<uint16_t*>(room.get()), rows};
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    if (tiled(*l)) {
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r) split_row(x + r * l->k, split, l->k, r);
    }
    linear_share(*l, x, split, rows, y, l->n, false);
  }
}

// Runs all layers, the final norm and the output head.
void specdec_step(const Model* model, const Step* step) {
  const Model& m = *model;
  const Step& s = *step;
  const long rows = s.rows, h = m.hidden, d = m.head_dim, repeats = m.heads / m.kv_heads;
  const long qkv_width = (m.heads + 2 * m.kv_heads) * d, out_width = m.heads * d;
  // the inputs of one tiled layer at a time; first, so that its lines are aligned
  const Split split{reinterpret_cast<uint16_t*>(s.scratch), rows};
  const long longest = std::max({h, out_width, static_cast<long>(m.inner)});
  float* normed = s.scratch + split_floats(rows, longest);  // [T, H]
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
      for (long r = 0; r < rows; ++r) {
        rms_norm(s.x + r * h, layer.input_norm, normed + r * h, h, m.eps);
        if (tiled(layer.qkv)) split_row(normed + r * h, split, h, r);
      }
      linear_share(layer.qkv, normed, split, rows, qkv, qkv_width, false);
#pragma omp barrier
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r) place(m, layer, s, r, qkv + r * qkv_width);
#pragma omp for schedule(dynamic, 1)
      for (long item = 0; item < static_cast<long>(chunks.size()) * per_chunk; ++item) {
        const Chunk& chunk = chunks[item / per_chunk];
        attend(m, layer, s.segments[chunk.segment], chunk, item % per_chunk * per_item, per_item, qkv,
               qkv_width, mixed, out_width, work);
      }
      if (tiled(layer.out)) {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; ++r) split_row(mixed + r * out_width, split, out_width, r);
      }
      linear_share(layer.out, mixed, split, rows, s.x, h, true);
#pragma omp barrier
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r) {
        rms_norm(s.x + r * h, layer.post_norm, normed + r * h, h, m.eps);
        if (tiled(layer.gate_up)) split_row(normed + r * h, split, h, r);
      }
      linear_share(layer.gate_up, normed, split, rows, gates, 2 * m.inner, false);
#pragma omp barrier
      // a tile's width at a time where the next layer is tiled
      const long width = tiled(layer.down) ? TILE_K : 8, pieces = m.inner / width;
#pragma omp for schedule(static)
      for (long i = 0; i < rows * pieces; ++i) {
        const long r = i / pieces, from = i % pieces * width;
        float* to = acted + r * m.inner;
        for (long c = from; c < from + width; c += 8) {
          const float* gate = gates + r * 2 * m.inner + c;
          _mm256_storeu_ps(to + c, _mm256_mul_ps(silu8(_mm256_loadu_ps(gate)),
                                                 _mm256_loadu_ps(gate + m.inner)));
        }
        if (tiled(layer.down)) split_chunk(to + from, split, m.inner, i % pieces, r);
      }
      linear_share(layer.down, acted, split, rows, s.x, h, true);
#pragma omp barrier
    }
    const Split last{split.parts, s.logit_count};
#pragma omp for schedule(static)
    for (long r = 0; r < s.logit_count; ++r) {
      rms_norm(s.x + s.logit_rows[r] * h, m.final_norm, s.hidden + r * h, h, m.eps);
      if (tiled(m.lm_head)) split_row(s.hidden + r * h, last, h, r);
    }
    linear_share(m.lm_head, s.hidden, last, s.logit_count, s.logits, m.lm_head.n, false);
  }
}

}  // extern "C"
