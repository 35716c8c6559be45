// What a step reads of a model and of its inputs. structs.py has the same fields in this order.

#pragma once

#include <cstdint>

#include "packing.h"

namespace specdec {

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

}  // namespace specdec
