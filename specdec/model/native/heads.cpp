// Sequential draft heads: states of nodes, and the likeliest tokens below them.
//
// The same computation as specdec/heads/sequential.py, where its source is given.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "bytes.h"
#include "linear.h"
#include "model.h"
#include "vector.h"

namespace specdec {

struct HeadBlock {
  Linear up, down;
};

struct Heads {
  Linear first, following, out;
  ByteRows lm_head;
  const HeadBlock* blocks;
  const float* depth_bias;  // [depths, S]
  const float* ones;        // [max(S, H)]
  int64_t block_count, width, hidden, inner, vocabulary;
  float eps;
};

namespace {

// The `count` largest of n logits, by falling value, ties by index, and their probabilities.
void likeliest(const float* logits, long n, long count, int64_t* tokens, float* probabilities) {
  std::vector<float> best(count, -std::numeric_limits<float>::infinity());
  std::fill_n(tokens, count, 0);
  for (long i = 0; i < n; ++i) {
    if (!(logits[i] > best[count - 1])) continue;
    long at = count - 1;
    for (; at > 0 && logits[i] > best[at - 1]; --at) {
      best[at] = best[at - 1];
      tokens[at] = tokens[at - 1];
    }
    best[at] = logits[i];
    tokens[at] = i;
  }
  const __m256 top = _mm256_set1_ps(best[0]);
  __m256 sum = _mm256_setzero_ps();
  long i = 0;
  for (; i + 8 <= n; i += 8)
    sum = _mm256_add_ps(sum, exp8(_mm256_sub_ps(_mm256_loadu_ps(logits + i), top)));
  float total = sum8(sum);
  for (; i < n; ++i) total += std::exp(logits[i] - best[0]);
  for (long c = 0; c < count; ++c) probabilities[c] = std::exp(best[c] - best[0]) / total;
}

}  // namespace
}  // namespace specdec

using namespace specdec;

extern "C" {

// Sizes of the structs that structs.py repeats.
int64_t specdec_struct_bytes(int64_t number) {
  const int64_t sizes[] = {sizeof(Linear),  sizeof(Layer), sizeof(Model),
                           sizeof(Segment), sizeof(Step),  sizeof(Heads),
                           sizeof(ByteRows)};
  return sizes[number];
}

// States [R, S] of `rows` nodes at `depth` (0: roots) from their parents' states [R, source]
// (for roots: the target's hidden states) and their embeddings [R, H]. `depth` counts that of
// the tokens to be proposed from 0. `scratch`: R * (source + H + S + 3 * inner) floats, and R
// rounded up to 16 times as many as the widest input of a layer has.
void specdec_heads_states(const Heads* heads, int64_t depth, int64_t rows, const float* parents,
                          int64_t source, const float* embeddings, float* states, float* scratch,
                          int64_t threads) {
  const Heads& h = *heads;
  const Linear& mix = depth == 0 ? h.first : h.following;
  const Split split{reinterpret_cast<uint16_t*>(scratch), rows};  // of one layer at a time
  float* joined = scratch + split_floats(rows, std::max({mix.k, h.width, h.inner}));  // [R, source + H]
  float* normed = joined + rows * mix.k;         // [R, S]
  float* gates = normed + rows * h.width;        // [R, 2 * inner]
  float* acted = gates + rows * 2 * h.inner;     // [R, inner]
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
#pragma omp for schedule(static)
    for (long r = 0; r < rows; ++r) {
      rms_norm(parents + r * source, h.ones, joined + r * mix.k, source, h.eps);
      std::copy_n(embeddings + r * h.hidden, h.hidden, joined + r * mix.k + source);
      if (tiled(mix)) split_row(joined + r * mix.k, split, mix.k, r);
    }
    linear_share(mix, joined, split, rows, states, h.width, false);
#pragma omp barrier
    for (long b = 0; b < h.block_count; ++b) {
      const Linear &up = h.blocks[b].up, &down = h.blocks[b].down;
#pragma omp for schedule(static)
      for (long r = 0; r < rows; ++r) {
        float* x = states + r * h.width;
        if (b == 0)
          for (long i = 0; i < h.width; ++i) x[i] += h.depth_bias[depth * h.width + i];
        rms_norm(x, h.ones, normed + r * h.width, h.width, h.eps);
        if (tiled(up)) split_row(normed + r * h.width, split, h.width, r);
      }
      linear_share(up, normed, split, rows, gates, 2 * h.inner, false);
#pragma omp barrier
      const long width = tiled(down) ? TILE_K : 8, pieces = h.inner / width;
#pragma omp for schedule(static)
      for (long i = 0; i < rows * pieces; ++i) {
        const long r = i / pieces, from = i % pieces * width;
        float* to = acted + r * h.inner;
        for (long c = from; c < from + width; c += 8) {
          const float* value = gates + r * 2 * h.inner + c;
          _mm256_storeu_ps(to + c, _mm256_mul_ps(_mm256_loadu_ps(value),
                                                 silu8(_mm256_loadu_ps(value + h.inner))));
        }
        if (tiled(down)) split_chunk(to + from, split, h.inner, i % pieces, r);
      }
      linear_share(down, acted, split, rows, states, h.width, true);
#pragma omp barrier
    }
  }
}

// The `count` likeliest rows of the draft vocabulary below each of `rows` states, with their
// probabilities: [R, count] both. `scratch`: R * (S + 2 * H + vocabulary + 1)
// floats, and R rounded up to 16 times S.
void specdec_heads_propose(const Heads* heads, int64_t rows, const float* states, int64_t count,
                           int64_t* tokens, float* probabilities, float* scratch, int64_t threads) {
  const Heads& h = *heads;
  const Split split{reinterpret_cast<uint16_t*>(scratch), rows};  // as [R, S]
  float* normed = scratch + split_floats(rows, h.width);  // [R, S]
  float* features = normed + rows * h.width;    // [R, H]
  float* logits = features + rows * h.hidden;   // [R, V']
  float* scales = logits + rows * h.vocabulary; // [R]
  int16_t* words = reinterpret_cast<int16_t*>(scales + rows);  // [R, H]
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
#pragma omp for schedule(static)
    for (long r = 0; r < rows; ++r) {
      rms_norm(states + r * h.width, h.ones, normed + r * h.width, h.width, h.eps);
      if (tiled(h.out)) split_row(normed + r * h.width, split, h.width, r);
    }
    linear_share(h.out, normed, split, rows, features, h.hidden, false);
#pragma omp barrier
#pragma omp for schedule(static)
    for (long r = 0; r < rows; ++r)
      scales[r] = to_words(features + r * h.hidden, h.hidden, words + r * h.hidden);
    byte_share(h.lm_head, words, scales, rows, logits);
#pragma omp barrier
#pragma omp for schedule(static)
    for (long r = 0; r < rows; ++r)
      likeliest(logits + r * h.vocabulary, h.vocabulary, count, tokens + r * count,
                probabilities + r * count);
  }
}

}  // extern "C"
