// The vocabulary every ISA implements. A Kernels table is chosen once at start-up; blocks call through it.
//
// Batch invariance is part of the contract: the value computed for (token, row) does not depend on how many tokens or
// rows are in the call. Every reduction over columns runs in one fixed order per ISA. The integer kernels (matmul_q8)
// add per block with fmaf in block order, lane = row, so that all ISAs give the *same bits* as scalar.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "smoe/model.h"
#include "smoe/status.h"

namespace smoe {

// A matrix as a kernel sees it.
struct Matrix {
  Encoding encoding = Encoding::f32;
  Layout layout = Layout::rows;
  uint64_t rows = 0, cols = 0;
  const uint8_t* data = nullptr;
};

// int8 activations of one token: blocks of `group` values (32 for Q8_0 and Q4_0, 256 for the K encodings), each with a
// float scale d = amax / 127, values round-to-nearest-even(x / d) in -127..127, and the sum of each 16 (K) or 32
// values. The byte arrangement is private to engine/kernels; callers only need its size.
enum class ActFormat : uint8_t { none, q8_32, q8_256 };
ActFormat act_format(Encoding weights);               // none for plain encodings
size_t act_row_bytes(ActFormat format, size_t cols);  // multiple of 64

// Keys and values in 8 bits: blocks of 32 values: level * scale, scale = max |x| / 127 rounded to f16. 34 bytes, no
// padding.
struct Kv8Block {
  static constexpr size_t kValues = 32;
  uint16_t scale;
  int8_t level[kValues];
};

// n keys and n values of one kv head, rows of `row_bytes` bytes one after the other; dim values of a key and value_dim
// <= dim of a value count.
enum class KvRows : uint8_t { f16, f32, kv8 };
struct AttnTile {
  KvRows rows = KvRows::f16;
  const uint8_t *keys = nullptr, *values = nullptr;
  size_t n = 0, row_bytes = 0, dim = 0, value_dim = 0;
  float scale = 1;
  size_t ahead = 0;  // bytes from here to the rows that are wanted next, to be brought near; 0: there are none
};
// Floats that attn_fold needs for the scores of a tile of n keys, n a multiple of 16.
constexpr size_t attn_score_floats(size_t n) { return 8 * n; }

struct Kernels {
  const char* name;
  int rank;  // the highest supported rank wins under "auto"
  bool (*supported)();

  // x float32 [tokens, cols] (stride x_stride floats) -> out, act_row_bytes apart.
  void (*quantize_act)(ActFormat f, const float* x, size_t tokens, size_t cols, size_t x_stride, uint8_t* out);

  // y[t * y_stride + r] = sum_k w[r, k] * x[t, k] for rows r in [row0, row1). For panel16 row0 is a multiple of 16 and
  // row1 a multiple of 16 or w.rows. acts: int8 activations, act_row_bytes apart; act_index (may be null) picks the
  // activation row for token t, so that an expert reads the shared quantised rows without a copy.
  void (*matmul_q8)(const Matrix& w, const uint8_t* acts, const uint32_t* act_index, size_t tokens, size_t row0,
                    size_t row1, float* y, size_t y_stride);
  // The same with float32 activations; any encoding (quantised weights are decoded): plain matrices and the float mode.
  void (*matmul_f32)(const Matrix& w, const float* x, size_t x_stride, const uint32_t* x_index, size_t tokens,
                     size_t row0, size_t row1, float* y, size_t y_stride);

  // One query and n rows [n, dim] contiguous, f16 or f32 (kv_f32).
  // scores[i] = scale * q . k_i ;   acc[d] += sum_i p[i] * v_i[d], i ascending.
  void (*attn_scores)(const float* q, const void* k, bool kv_f32, size_t n, size_t dim, float scale, float* scores);
  void (*attn_values)(const float* p, const void* v, bool kv_f32, size_t n, size_t dim, float* acc);
  // Folds a tile into the states of `queries` queries, q[i] each: maximum and sum of their softmax, and
  // out[i * value_dim], what they have gathered so far, not divided by the sum. A new state is -infinity, 0 and zeros.
  void (*attn_fold)(const AttnTile& tile, const float* const* q, size_t queries, float* scores, float* out, float* max,
                    float* sum);

  // out[i] = x[i] * weight[i] / sqrt(mean(x^2) + eps), n values.
  void (*rms_norm)(const float* x, const float* weight, size_t n, float eps, float* out);
  // gate[i] = silu(gate[i]) * up[i]
  void (*silu_mul)(float* gate, const float* up, size_t n);
  // softmax pieces: x[i] = exp(x[i] - max), returns the sum, i ascending in fixed lanes.
  float (*exp_sum)(float* x, size_t n, float max);
  float (*max_value)(const float* x, size_t n);
  void (*f32_to_f16_row)(const float* x, size_t n, uint16_t* out);
  void (*f16_to_f32_row)(const uint16_t* x, size_t n, float* out);
  // Keys and values in 8 bits: n values, a multiple of 32, as blocks of an f16 scale and 32 signed levels (Kv8Block).
  // The same bytes and floats on every ISA.
  void (*f32_to_kv8_row)(const float* x, size_t n, uint8_t* out);
  void (*kv8_to_f32_row)(const uint8_t* x, size_t n, float* out);

  // One position of a causal convolution of each of n channels with itself: out[c] = bias[c] (null: 0) + sum over taps
  // j, oldest first, of w[j * w_stride + c] * x[j][c]; through silu where asked for.
  void (*conv_row)(const float* const* x, const float* w, size_t w_stride, const float* bias, size_t taps, size_t n,
                   bool silu, float* out);
  // One position of a linear recurrence over a state [keys, values]: S = decay[k] S + k[k] u[v], and unless out is null
  // out[v] = sum over k, ascending, of q[k] S.
  void (*state_step)(float* state, size_t keys, size_t values, const float* decay, const float* k, const float* u,
                     const float* q, float* out);
  // The same where each element of the state decays by itself: S = exp(dt[v] a[k * a_stride + v]) S + k[k] u[v].
  void (*selective_step)(float* state, size_t keys, size_t values, const float* a, size_t a_stride, const float* dt,
                         const float* k, const float* u, const float* q, float* out);
};

// Kernel files register themselves: static const RegisterKernels r(&table); placed after their target region closes.
struct RegisterKernels {
  explicit RegisterKernels(const Kernels* k);
};
const std::vector<const Kernels*>& all_kernels();
// "auto" = the best this CPU and its OS support. Unknown or unsupported names: Code::usage listing what there is.
// Fails loudly if "scalar" is missing (a static archive would drop the registration).
Result<const Kernels*> choose_kernels(const std::string& isa);

}  // namespace smoe
