#include "core/forward.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "quant/quant.h"

namespace smoe {
Forward::Forward(const ModelSpec& model, const Trunk& trunk, ExpertCache& cache, Workspace& ws, const Compute& compute,
                 uint32_t spec)
    : model_(model), trunk_(trunk), cache_(cache), ws_(ws), compute_(compute), spec_(spec) {
  size_t experts = 0;
  for (const LayerSpec& l : model.layers) experts = std::max<size_t>(experts, l.ffn.experts);
  ready_.reserve(experts);
}

Status Forward::run(const KvState& kv, const int32_t* ids, size_t T, uint64_t position, size_t first) {
  layer_trace_.clear();
  SMOE_TRY(embed(ids, T));
  fill_ropes(position, T);
  const size_t rows = model_.layers.size() > 1 ? T : T - first;
  const Ahead ahead = ahead_of(0, ws_.x + (T - rows) * model_.hidden, rows);
  if (ahead.router != nullptr) read_ahead(compute_, ahead, cache_, ws_);
  lap_.into(&buckets_.other);
  for (size_t i = 0; i < model_.layers.size(); ++i) SMOE_TRY(layer(i, kv, T, position, first));
  if (trace_ != nullptr)
    for (size_t row = 0; row < T - first; ++row)
      for (const auto& of_layer : layer_trace_) {
        const size_t k = of_layer.size() / (T - first);
        trace_->insert(trace_->end(), of_layer.begin() + row * k, of_layer.begin() + (row + 1) * k);
      }
  return Status::ok();
}

Status Forward::embed(const int32_t* ids, size_t T) {
  const size_t H = model_.hidden;
  const auto row = [&](size_t t) {
    float* x = ws_.x + t * H;
    SMOE_TRY(trunk_.embedding(static_cast<uint64_t>(ids[t]), x, ws_.normed + t * H));
    for (size_t i = 0; model_.embed_scale != 1 && i < H; ++i) x[i] *= model_.embed_scale;
    return Status::ok();
  };
  for (size_t t = 0; t < T; ++t) trunk_.expect_embedding(static_cast<uint64_t>(ids[t]));
  std::atomic<bool> failed = false;
  compute_.pool->run(T, [&](size_t t, size_t) {
    if (!row(t).is_ok()) failed = true;
  });
  for (size_t t = 0; failed && t < T; ++t) SMOE_TRY(row(t));  // once more, for the error or for a disk that recovered
  return Status::ok();
}

void Forward::fill_ropes(uint64_t position, size_t T) {
  for (size_t r = 0; r < model_.ropes.size(); ++r) {
    const RopeSpec& rope = model_.ropes[r];
    const size_t base = r * ws_.rows * ws_.rope_half;
    compute_.pool->run(T, [&](size_t t, size_t) {
      const float p = static_cast<float>(position + t);
      for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
        const float angle = p * rope.inv_freq[i];
        ws_.rope_cos[base + t * ws_.rope_half + i] = std::cos(angle) * rope.scale;
        ws_.rope_sin[base + t * ws_.rope_half + i] = std::sin(angle) * rope.scale;
      }
    });
  }
}

void Forward::mix(size_t i, const KvState& state, Activations& input, uint64_t position, size_t first) {
  const AttentionSpec& a = model_.layers[i].attention;
  if (a.is_recurrent()) return recur(i, state.recurrent().layer(i), input, position, first);
  const KvLayer& kv = state.layer(i);
  const LayerWeights& w = trunk_.layer(i);
  const RopeSpec& rope = model_.ropes[a.rope];
  switch (a.block) {
    case AttentionBlock::gqa:
      return attention_gqa(compute_, a, w.attention, model_.norm_eps, kv, rope, ws_, input, position, first);
    case AttentionBlock::mla:
      return attention_mla(compute_, a, w.latent, kv, rope, ws_, input, position, first);
    default:
      return;
  }
}

void Forward::recur(size_t i, const RecurrentLayer& state, Activations& input, uint64_t position, size_t first) {
  const LayerWeights& w = trunk_.layer(i);
  const RecurrentSpec& spec = model_.layers[i].recurrent;
  switch (model_.layers[i].attention.block) {
    case AttentionBlock::short_conv:
      return short_conv(compute_, spec, w.short_conv, state, ws_, input, position, first);
    case AttentionBlock::delta:
      return delta(compute_, spec, w.delta, state, ws_, input, position, first);
    case AttentionBlock::mamba2:
      return mamba2(compute_, spec, w.mamba2, state, ws_, input, position, first);
    case AttentionBlock::mamba:
      return mamba(compute_, spec, w.mamba, state, ws_, input, position, first);
    default:
      return;
  }
}

Status Forward::layer(size_t i, const KvState& kv, size_t T, uint64_t position, size_t first) {
  const LayerWeights& w = trunk_.layer(i);
  const bool last = i + 1 == model_.layers.size();
  const size_t from = last ? first : 0, rows = T - from;
  float* x = ws_.x + from * model_.hidden;
  Activations input(ws_.acts_32, ws_.acts_256);
  read(ws_.x, w.attn_norm, T, &input);
  mix(i, kv, input, position, from);
  if (rows > 0) add(x, w.attn_post_norm, rows);
  lap_.into(&buckets_.attention);
  if (rows == 0) return Status::ok();
  return feed_forward(i, x, rows, i + 2 < model_.layers.size() ? rows : T - first);
}

// What is known of a MoE layer's demand before it begins; without a router if it has none, or is not there.
Ahead Forward::ahead_of(size_t layer, const float* x, size_t rows) const {
  Ahead ahead;
  if (layer >= model_.layers.size() || !model_.layers[layer].ffn.is_moe() || rows == 0) return ahead;
  const LayerWeights& w = trunk_.layer(layer);
  return {&model_.layers[layer].ffn, &w.moe.router, &w.ffn_norm, model_.norm, model_.norm_eps,
          w.moe.moe_layer,           rows,          x,           spec_};
}

Status Forward::feed_forward(size_t i, float* x, size_t rows, size_t rows_of_next) {
  const FfnSpec& spec = model_.layers[i].ffn;
  const LayerWeights& w = trunk_.layer(i);
  Activations input(ws_.acts_32, ws_.acts_256);
  read(x, w.ffn_norm, rows, &input);
  lap_.into(&buckets_.other);
  if (spec.is_moe()) {
    const Ahead ahead = ahead_of(i + 1, x + (rows - rows_of_next) * model_.hidden, rows_of_next);
    SMOE_TRY(moe(compute_, spec, w.moe, cache_, input, ws_, ws_.block_out, ready_,
                 ahead.router != nullptr ? &ahead : nullptr, &lap_, &buckets_));
    if (trace_ != nullptr) layer_trace_.emplace_back(ws_.chosen, ws_.chosen + rows * spec.top_k);
  } else {
    ffn(compute_, spec, w.dense, input, ws_, ws_.block_out);
    lap_.into(&buckets_.expert_compute);
  }
  add(x, w.ffn_post_norm, rows);
  // The last layer's surviving rows move to the front, where logits() finds them.
  if (i + 1 == model_.layers.size() && x != ws_.x) std::copy_n(x, rows * model_.hidden, ws_.x);
  lap_.into(&buckets_.other);
  return Status::ok();
}

float* Forward::logits(size_t row, size_t rows) {
  lap_.into(&buckets_.other);
  Activations input(ws_.acts_32, ws_.acts_256);
  read(ws_.x + row * model_.hidden, trunk_.final_norm(), rows, &input);
  linear(compute_, trunk_.head(), input, ws_.logits);
  for (size_t i = 0; model_.logit_scale != 1 && i < rows * model_.vocab; ++i) ws_.logits[i] *= model_.logit_scale;
  lap_.into(&buckets_.head);
  return ws_.logits;
}

void Forward::normalize(const float* x, const NormWeights& norm, size_t rows, float* out) {
  const size_t H = model_.hidden;
  compute_.pool->run(rows, [&](size_t t, size_t) {
    normalize_row(compute_, model_.norm, norm, x + t * H, H, model_.norm_eps, out + t * H);
  });
}

void Forward::read(const float* x, const NormWeights& norm, size_t rows, Activations* input) {
  if (norm.weight != nullptr) normalize(x, norm, rows, ws_.normed);
  input->bind(norm.weight != nullptr ? ws_.normed : x, rows, model_.hidden);
}

void Forward::add(float* x, const NormWeights& post_norm, size_t rows) {
  if (post_norm.weight != nullptr) normalize(ws_.block_out, post_norm, rows, ws_.block_out);
  const float *y = ws_.block_out, scale = model_.residual_scale;
  const size_t n = rows * model_.hidden;
  if (scale == 1) {
    for (size_t i = 0; i < n; ++i) x[i] += y[i];
  } else {
    for (size_t i = 0; i < n; ++i) x[i] += y[i] * scale;
  }
}

}  // namespace smoe
