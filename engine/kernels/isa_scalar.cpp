// The truth: every kernel written as its definition reads. Integer dot products are exact; float sums go over blocks in
// order, one fused multiply-add each, as every other ISA must (see kernels.h).
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/act.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "quant/codec.h"

namespace smoe {
namespace {

constexpr size_t kTokenTile = 16;  // a weight block is unpacked once per tile of tokens
constexpr size_t kPlainChunk = 64;

// d of a block of n activations, and its levels.
float quantize_block(const float* x, size_t n, int8_t* q) {
  uint32_t amax = 0;
  for (size_t k = 0; k < n; ++k) amax = std::max(amax, std::bit_cast<uint32_t>(x[k]) & 0x7fffffff);
  if (amax >= kNotFinite) {
    std::fill(q, q + n, static_cast<int8_t>(0));
    return std::bit_cast<float>(kQuietNan);
  }
  const float d = std::bit_cast<float>(amax) / 127.0f;
  for (size_t k = 0; k < n; ++k) {
    q[k] = d == 0 ? int8_t{0} : static_cast<int8_t>(std::clamp(std::nearbyintf(x[k] / d), -127.0f, 127.0f));
  }
  return d;
}

int32_t sum_of(const int8_t* q, size_t n) {
  int32_t sum = 0;
  for (size_t k = 0; k < n; ++k) sum += q[k];
  return sum;
}

void quantize_32(const float* x, size_t cols, Act32* out) {
  for (size_t k = 0; k < cols; k += 32, ++out) {
    out->d = quantize_block(x + k, 32, out->q);
    const int32_t sum = sum_of(out->q, 32);
    out->start128 = -128 * sum;
    out->start8 = -8 * sum;
    out->start16 = -16 * sum;
  }
}

void quantize_256(const float* x, size_t cols, Act256* out) {
  for (size_t k = 0; k < cols; k += 256, ++out) {
    out->d = quantize_block(x + k, 256, out->q);
    for (size_t s = 0; s < 16; ++s) {
      out->sum16[s] = static_cast<int16_t>(sum_of(out->q + 16 * s, 16));
      out->start32[s] = -32 * out->sum16[s];
    }
    for (size_t s = 0; s < 8; ++s) out->sum32[s] = static_cast<int16_t>(sum_of(out->q + 32 * s, 32));
    std::fill(std::begin(out->zero), std::end(out->zero), 0);
  }
}

void quantize_act(ActFormat f, const float* x, size_t tokens, size_t cols, size_t x_stride, uint8_t* out) {
  for (size_t t = 0; t < tokens; ++t, x += x_stride, out += act_row_bytes(f, cols)) {
    if (f == ActFormat::q8_32) quantize_32(x, cols, reinterpret_cast<Act32*>(out));
    if (f == ActFormat::q8_256) quantize_256(x, cols, reinterpret_cast<Act256*>(out));
  }
}

// The integers of block b of a row, from either layout.
void load_levels(const Matrix& w, const Codec& c, size_t row, size_t b, Levels* out) {
  const size_t row_size = w.cols / c.info.block_values * c.info.block_bytes;
  if (w.layout == Layout::rows) return c.levels(w.data + row * row_size + b * c.info.block_bytes, out);
  uint8_t block[kMaxBlockBytes];
  const uint8_t* panel = w.data + row / kPanelRows * kPanelRows * row_size;
  c.unpack_block(panel + b * kPanelRows * c.info.block_bytes, static_cast<uint32_t>(row % kPanelRows), block);
  c.levels(block, out);
}

// `count` values of a block from the first on, of one row, times one token's block: acc + d_w d_a (integer dot) -
// dmin_w d_a (integer dot with the sums).
float dot_block(const Levels& w, size_t first, size_t count, const int8_t* q, float d, float acc) {
  int32_t dot = 0, mins = 0;
  const size_t step = std::min<size_t>(w.sub, count);
  for (size_t k = 0; k < count; k += step) {
    int32_t part = 0, sum = 0;
    for (size_t i = k; i < k + step; ++i) {
      part += w.q[first + i] * q[i];
      sum += q[i];
    }
    dot += w.scale[(first + k) / w.sub] * part;
    mins += w.min[(first + k) / w.sub] * sum;
  }
  acc = std::fmaf(static_cast<float>(dot), w.d * d, acc);
  return w.has_min ? std::fmaf(-static_cast<float>(mins), w.dmin * d, acc) : acc;
}

void matmul_q8(const Matrix& w, const uint8_t* acts, const uint32_t* act_index, size_t tokens, size_t row0, size_t row1,
               float* y, size_t y_stride) {
  const Codec& c = codec(w.encoding);
  const ActFormat format = act_format(w.encoding);
  const size_t stride = act_row_bytes(format, w.cols), values = c.info.block_values, blocks = w.cols / values;
  const size_t act_values = format == ActFormat::q8_32 ? 32 : 256, parts = values / act_values;  // of a weight block
  const size_t act_bytes = format == ActFormat::q8_32 ? sizeof(Act32) : sizeof(Act256);
  const size_t d_offset = format == ActFormat::q8_32 ? offsetof(Act32, d) : offsetof(Act256, d);
  for (size_t row = row0; row < row1; ++row) {
    for (size_t t0 = 0; t0 < tokens; t0 += kTokenTile) {
      const size_t n = std::min(kTokenTile, tokens - t0);
      float acc[kTokenTile] = {};
      for (size_t b = 0; b < blocks; ++b) {
        Levels levels;
        load_levels(w, c, row, b, &levels);
        for (size_t t = 0; t < n; ++t) {
          const uint8_t* block = act_row(acts, act_index, t0 + t, stride) + b * parts * act_bytes;
          for (size_t i = 0; i < parts; ++i, block += act_bytes) {
            const float d = *reinterpret_cast<const float*>(block + d_offset);
            acc[t] = dot_block(levels, i * act_values, act_values, reinterpret_cast<const int8_t*>(block), d, acc[t]);
          }
        }
      }
      for (size_t t = 0; t < n; ++t) y[(t0 + t) * y_stride + row] = acc[t];
    }
  }
}

// `count` values of a row from column k, count at most a block or, for plain encodings, kPlainChunk.
void decode_chunk(const Matrix& w, size_t row, size_t k, size_t count, float* out) {
  const EncodingInfo& info = encoding_info(w.encoding);
  if (info.plain) return decode_rows(w.encoding, w.data + (row * w.cols + k) * info.block_bytes, count, out);
  const Codec& c = codec(w.encoding);
  const size_t row_size = w.cols / info.block_values * info.block_bytes, b = k / info.block_values;
  if (w.layout == Layout::rows) return c.decode_block(w.data + row * row_size + b * info.block_bytes, out);
  uint8_t block[kMaxBlockBytes];
  const uint8_t* panel = w.data + row / kPanelRows * kPanelRows * row_size;
  c.unpack_block(panel + b * kPanelRows * info.block_bytes, static_cast<uint32_t>(row % kPanelRows), block);
  c.decode_block(block, out);
}

void matmul_f32(const Matrix& w, const float* x, size_t x_stride, const uint32_t* x_index, size_t tokens, size_t row0,
                size_t row1, float* y, size_t y_stride) {
  const EncodingInfo& info = encoding_info(w.encoding);
  const size_t chunk = info.plain ? kPlainChunk : info.block_values;
  for (size_t row = row0; row < row1; ++row) {
    for (size_t t0 = 0; t0 < tokens; t0 += kTokenTile) {
      const size_t n = std::min(kTokenTile, tokens - t0);
      float acc[kTokenTile] = {};
      for (size_t k = 0; k < w.cols; k += chunk) {
        const size_t count = std::min<size_t>(chunk, w.cols - k);
        float values[kMaxBlockValues];
        decode_chunk(w, row, k, count, values);
        for (size_t t = 0; t < n; ++t) {
          const float* xt = x + (x_index ? x_index[t0 + t] : t0 + t) * x_stride + k;
          float sum = 0;
          for (size_t i = 0; i < count; ++i) sum += values[i] * xt[i];
          acc[t] += sum;
        }
      }
      for (size_t t = 0; t < n; ++t) y[(t0 + t) * y_stride + row] = acc[t];
    }
  }
}

float kv_value(const void* kv, bool f32, size_t i) {
  return f32 ? static_cast<const float*>(kv)[i] : f16_to_f32(static_cast<const uint16_t*>(kv)[i]);
}

void attn_scores(const float* q, const void* k, bool kv_f32, size_t n, size_t dim, float scale, float* scores) {
  for (size_t i = 0; i < n; ++i) {
    float sum = 0;
    for (size_t d = 0; d < dim; ++d) sum += q[d] * kv_value(k, kv_f32, i * dim + d);
    scores[i] = scale * sum;
  }
}

void attn_values(const float* p, const void* v, bool kv_f32, size_t n, size_t dim, float* acc) {
  for (size_t i = 0; i < n; ++i) {
    for (size_t d = 0; d < dim; ++d) acc[d] += p[i] * kv_value(v, kv_f32, i * dim + d);
  }
}

float kv_value(const AttnTile& t, const uint8_t* rows, size_t i, size_t d) {
  const uint8_t* row = rows + i * t.row_bytes;
  if (t.rows != KvRows::kv8) return kv_value(row, t.rows == KvRows::f32, d);
  const Kv8Block& block = reinterpret_cast<const Kv8Block*>(row)[d / Kv8Block::kValues];
  return static_cast<float>(block.level[d % Kv8Block::kValues]) * f16_to_f32(block.scale);
}

void attn_fold(const AttnTile& t, const float* const* q, size_t queries, float* scores, float* out, float* max,
               float* sum) {
  for (size_t row = 0; row < queries; ++row, out += t.value_dim) {
    float top = max[row];
    for (size_t i = 0; i < t.n; ++i) {
      scores[i] = 0;
      for (size_t d = 0; d < t.dim; ++d) scores[i] += q[row][d] * kv_value(t, t.keys, i, d);
      scores[i] *= t.scale;
      top = std::max(top, scores[i]);
    }
    const float shrink = std::exp(max[row] - top);
    max[row] = top;
    sum[row] *= shrink;
    for (size_t d = 0; d < t.value_dim; ++d) out[d] *= shrink;
    for (size_t i = 0; i < t.n; ++i) {
      const float p = std::exp(scores[i] - top);
      sum[row] += p;
      for (size_t d = 0; d < t.value_dim; ++d) out[d] += p * kv_value(t, t.values, i, d);
    }
  }
}

void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out) {
  float sum = 0;
  for (size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (size_t i = 0; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void silu_mul(float* gate, const float* up, size_t n) {
  for (size_t i = 0; i < n; ++i) gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

float exp_sum(float* x, size_t n, float max) {
  float sum = 0;
  for (size_t i = 0; i < n; ++i) {
    x[i] = std::exp(x[i] - max);
    sum += x[i];
  }
  return sum;
}

float max_value(const float* x, size_t n) {
  float best = -INFINITY;
  for (size_t i = 0; i < n; ++i) best = std::max(best, x[i]);
  return best;
}

void f32_to_f16_row(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; ++i) out[i] = f32_to_f16(x[i]);
}

void f16_to_f32_row(const uint16_t* x, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = f16_to_f32(x[i]);
}

// Rounded to nearest, ties to even. A block that is all zero, or not finite, has no levels.
int8_t kv8_level(float x, float scale) {
  if (!(scale > 0) || !std::isfinite(scale)) return 0;
  return static_cast<int8_t>(std::clamp(std::nearbyint(x / scale), -127.0f, 127.0f));
}

void f32_to_kv8_row(const float* x, size_t n, uint8_t* out) {
  for (auto* block = reinterpret_cast<Kv8Block*>(out); n > 0; n -= Kv8Block::kValues, x += Kv8Block::kValues, ++block) {
    float most = 0;
    for (size_t i = 0; i < Kv8Block::kValues; ++i) most = std::max(most, std::fabs(x[i]));
    block->scale = f32_to_f16(most / 127.0f);
    const float scale = f16_to_f32(block->scale);
    for (size_t i = 0; i < Kv8Block::kValues; ++i) block->level[i] = kv8_level(x[i], scale);
  }
}

void kv8_to_f32_row(const uint8_t* x, size_t n, float* out) {
  const auto* block = reinterpret_cast<const Kv8Block*>(x);
  for (size_t k = 0; k < n; k += Kv8Block::kValues, ++block) {
    const float scale = f16_to_f32(block->scale);
    for (size_t i = 0; i < Kv8Block::kValues; ++i) out[k + i] = static_cast<float>(block->level[i]) * scale;
  }
}

void conv_row(const float* const* x, const float* w, size_t w_stride, const float* bias, size_t taps, size_t n,
              bool silu, float* out) {
  for (size_t c = 0; c < n; ++c) {
    float sum = bias == nullptr ? 0.0f : bias[c];
    for (size_t j = 0; j < taps; ++j) sum += w[j * w_stride + c] * x[j][c];
    out[c] = silu ? sum / (1.0f + std::exp(-sum)) : sum;
  }
}

void state_step(float* state, size_t keys, size_t values, const float* decay, const float* k, const float* u,
                const float* q, float* out) {
  if (out != nullptr) std::fill_n(out, values, 0.0f);
  for (size_t i = 0; i < keys; ++i) {
    for (size_t v = 0; v < values; ++v) {
      float& s = state[i * values + v];
      s = decay[i] * s + k[i] * u[v];
      if (out != nullptr) out[v] += q[i] * s;
    }
  }
}

void selective_step(float* state, size_t keys, size_t values, const float* a, size_t a_stride, const float* dt,
                    const float* k, const float* u, const float* q, float* out) {
  if (out != nullptr) std::fill_n(out, values, 0.0f);
  for (size_t i = 0; i < keys; ++i) {
    for (size_t v = 0; v < values; ++v) {
      float& s = state[i * values + v];
      s = std::exp(dt[v] * a[i * a_stride + v]) * s + k[i] * u[v];
      if (out != nullptr) out[v] += q[i] * s;
    }
  }
}

bool always() { return true; }

constexpr Kernels kScalar = {
    "scalar",       0,        always,     quantize_act,  matmul_q8, matmul_f32,     attn_scores,    attn_values,
    attn_fold,      rms_norm, silu_mul,   exp_sum,       max_value, f32_to_f16_row, f16_to_f32_row, f32_to_kv8_row,
    kv8_to_f32_row, conv_row, state_step, selective_step};
const RegisterKernels registration(&kScalar);

}  // namespace

const Kernels& scalar_kernels() { return kScalar; }

}  // namespace smoe
