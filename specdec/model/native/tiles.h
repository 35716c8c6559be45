// Linear layers on the matrix units of CPUs that have them (AMX): bfloat16 weights, activations
// as the sum of two bfloat16 numbers, sums in float32.
//
// x = high + low leaves an error of 2^-17 x, a hundredth of a bfloat16 activation's, and the
// weights are read once for both. Up to some thirty rows the step still waits for the weights.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "packing.h"

#if defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define SPECDEC_TILES 1
#endif

namespace specdec {

constexpr long TILE_K = 32;     // inputs of a tile
constexpr long TILE_ROWS = 16;  // rows of a tile

inline bool tiles_on = false;  // set by use_tiles

// Whether this layer is computed by tiles; the same for every number of rows.
inline bool tiled(const Linear& l) { return tiles_on && l.k % TILE_K == 0; }

// Activations as tiles read them: [rows / 16, k / 32, 2, 16, 32], high parts before low ones.
struct Split {
  uint16_t* parts;
  long rows;
  uint16_t* at(long k, long chunk, long row) const {
    const long tile = row / TILE_ROWS * (k / TILE_K) + chunk;
    return parts + (tile * 2 * TILE_ROWS + row % TILE_ROWS) * TILE_K;
  }
};

// Floats of room for that.
inline long split_floats(long rows, long k) {
  return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * k;
}

#ifdef SPECDEC_TILES

// Whether the processor has the units and the system lets this process use them.
inline bool tiles_there() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d & (1u << 24), brain = d & (1u << 22), wide = b & (1u << 16);
  if (!tile || !brain || !wide) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return false;  // AVX512_BF16
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2)
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

#define SPECDEC_TILE_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

// 32 numbers of a row.
SPECDEC_TILE_TARGET inline void split_chunk(const float* x, const Split& s, long k, long chunk, long row) {
  uint16_t *high = s.at(k, chunk, row), *low = high + TILE_ROWS * TILE_K;
  for (long i = 0; i < TILE_K; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __m256i top = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
    const __m512 back =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(top), 16));
    const __m256i rest = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_sub_ps(v, back)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), top);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), rest);
  }
}

// Shapes of the eight tile registers: 0-3 sums, 4-5 activations, 6-7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // For `count` rows of activations.
  explicit TileShapes(long count) {
    std::fill_n(bytes, 8, uint16_t{64});
    std::fill_n(rows, 6, static_cast<uint8_t>(count));
    rows[6] = rows[7] = TILE_ROWS;
  }
};

// Writes, or adds to what is there, `rows` rows of a block's sums.
SPECDEC_TILE_TARGET inline void put_block(const Linear& l, const float* sums, long rows, long block,
                                          float* y, long ldy, bool add) {
  const long column = block * COLS, width = std::min(COLS, l.n - column);
  const auto mask = static_cast<__mmask16>((1u << width) - 1);
  const __m512 bias = l.bias ? _mm512_maskz_loadu_ps(mask, l.bias + column) : _mm512_setzero_ps();
  for (long r = 0; r < rows; ++r) {
    float* to = y + r * ldy + column;
    __m512 v = _mm512_add_ps(_mm512_load_ps(sums + r * COLS), bias);
    if (add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), v);
    _mm512_mask_storeu_ps(to, mask, v);
  }
}

constexpr long TILE_WORDS = COLS * TILE_K / 2;  // of weights
constexpr long AHEAD = 4;                       // tiles that are fetched before they are used
constexpr long BLOCKS = 4;                      // that share a tile of activations

// Fetches the tile of weights that comes AHEAD tiles after tile c of a block of `chunks` tiles,
// if need be of the block that is `next` blocks further.
inline void fetch_ahead(const uint32_t* block, long c, long chunks, long next) {
  const long tile = c + AHEAD < chunks ? c + AHEAD : c + AHEAD - chunks + next * chunks;
  for (long line = 0; line < TILE_WORDS; line += 16)
    _mm_prefetch(reinterpret_cast<const char*>(block + tile * TILE_WORDS + line), _MM_HINT_T0);
}

// Up to 16 rows times `count` consecutive blocks, at most BLOCKS.
SPECDEC_TILE_TARGET inline void tile_rows(const Linear& l, const Split& s, long row, long rows,
                                           long block, long count, float* y, long ldy, bool add) {
  const long chunks = l.k / TILE_K;
  const uint32_t* w = l.weight + block * chunks * TILE_WORDS;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long c = 0; c < chunks; ++c) {
    const uint16_t* a = s.at(l.k, c, row);
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a + TILE_ROWS * TILE_K, 64);
#define FETCH(number, weights)                                     \
  if (count > number) {                                            \
    const uint32_t* b = w + number * chunks * TILE_WORDS;          \
    if (row == 0) fetch_ahead(b, c, chunks, BLOCKS);                    \
    _tile_loadd(weights, b + c * TILE_WORDS, 64);                  \
  }
#define MULTIPLY(number, part, weights) if (count > number) _tile_dpbf16ps(number, part, weights);
    FETCH(0, 6)
    FETCH(1, 7)
    MULTIPLY(0, 4, 6)
    MULTIPLY(1, 4, 7)
    MULTIPLY(0, 5, 6)
    MULTIPLY(1, 5, 7)
    FETCH(2, 6)
    FETCH(3, 7)
    MULTIPLY(2, 4, 6)
    MULTIPLY(3, 4, 7)
    MULTIPLY(2, 5, 6)
    MULTIPLY(3, 5, 7)
#undef FETCH
#undef MULTIPLY
  }
  alignas(64) float sums[4][TILE_ROWS * COLS];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (long b = 0; b < count; ++b)
    put_block(l, sums[b], rows, block + b, y + row * ldy, ldy, add);
}

// The blocks [from, to) of y[rows, n] (+)= x W^T + bias.
SPECDEC_TILE_TARGET inline void tile_blocks(const Linear& l, const Split& s, long from, long to,
                                            float* y, long ldy, bool add) {
  long shaped = 0;
  for (long block = from; block < to; block += BLOCKS) {
    const long count = std::min(BLOCKS, to - block);
    for (long row = 0; row < s.rows; row += TILE_ROWS) {
      const long rows = std::min(TILE_ROWS, s.rows - row);
      if (rows != shaped) {
        const TileShapes shapes(rows);
        _tile_loadconfig(&shapes);
        shaped = rows;
      }
      tile_rows(l, s, row, rows, block, count, y, ldy, add);
    }
  }
  _tile_release();
}

#undef SPECDEC_TILE_TARGET
#else

inline bool tiles_there() { return false; }
inline void split_chunk(const float*, const Split&, long, long, long) {}
inline void tile_blocks(const Linear&, const Split&, long, long, float*, long, bool) {}

#endif

// Row `row` of what a tiled layer with k inputs reads.
inline void split_row(const float* x, const Split& s, long k, long row) {
  for (long chunk = 0; chunk < k / TILE_K; ++chunk) split_chunk(x + chunk * TILE_K, s, k, chunk, row);
}

}  // namespace specdec
