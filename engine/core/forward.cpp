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
  ids_.reserve(ws.rows);
  batch_.reserve(ws.rows);
}

size_t Forward::lay_out(std::span<const Part> parts) {
  batch_.clear();
  ids_.clear();
  size_t first = 0;
  for (const Part& part : parts) {
    if (first == ids_.size()) first += part.first;  // nothing before is wanted
    batch_.push_back({ids_.size(), part.rows, part.position});
    ids_.insert(ids_.end(), part.ids, part.ids + part.rows);
  }
  return first;
}

Status Forward::run(std::span<const Part> parts) {
  layer_trace_.clear();
  const size_t first = lay_out(parts), T = ids_.size();
  SMOE_TRY(embed());
  fill_ropes();
  const size_t rows = model_.layers.size() > 1 ? T : T - first;
  const Ahead ahead = ahead_of(0, ws_.x + (T - rows) * model_.hidden, rows);
  if (ahead.router != nullptr) read_ahead(compute_, ahead, cache_, ws_);
  lap_.into(&buckets_.other);
  for (size_t i = 0; i < model_.layers.size(); ++i) SMOE_TRY(layer(i, parts, first));
  gather_wanted(parts);
  if (trace_ != nullptr)
    for (size_t row = 0; row < T - first; ++row)
      for (const auto& of_layer : layer_trace_) {
        const size_t k = of_layer.size() / (T - first);
        trace_->insert(trace_->end(), of_layer.begin() + row * k, of_layer.begin() + (row + 1) * k);
      }
  return Status::ok();
}

void Forward::gather_wanted(std::span<const Part> parts) {
  const size_t H = model_.hidden;
  float* to = ws_.x;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t begin = batch_[i].row + parts[i].first, count = parts[i].rows - parts[i].first;
    if (count == 0) continue;
    const float* from = ws_.x + begin * H;
    if (from != to) std::copy_n(from, count * H, to);  // towards the front, where nothing is left to be moved
    to += count * H;
  }
  lap_.into(&buckets_.other);
}

Status Forward::embed() {
  const size_t H = model_.hidden, T = ids_.size();
  const std::vector<int32_t>& ids = ids_;
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

void Forward::fill_ropes() {
  for (size_t r = 0; r < model_.ropes.size(); ++r) {
    const RopeSpec& rope = model_.ropes[r];
    const size_t base = r * ws_.rows * ws_.rope_half;
    compute_.pool->run(ids_.size(), [&](size_t t, size_t) {
      const float p = static_cast<float>(sequence_of(batch_, t).position_of(t));
      for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
        const float angle = p * rope.inv_freq[i];
        ws_.rope_cos[base + t * ws_.rope_half + i] = std::cos(angle) * rope.scale;
        ws_.rope_sin[base + t * ws_.rope_half + i] = std::sin(angle) * rope.scale;
      }
    });
  }
}

void Forward::mix(size_t i, Activations& input, size_t first) {
  const AttentionSpec& a = model_.layers[i].attention;
  if (a.is_recurrent()) return recur(i, input, first);
  const LayerWeights& w = trunk_.layer(i);
  const RopeSpec& rope = model_.ropes[a.rope];
  switch (a.block) {
    case AttentionBlock::gqa:
      return attention_gqa(compute_, a, w.attention, model_.norm_eps, batch_, rope, ws_, input, first);
    case AttentionBlock::mla:
      return attention_mla(compute_, a, w.latent, batch_, rope, ws_, input, first);
    default:
      return;
  }
}

void Forward::recur(size_t i, Activations& input, size_t first) {
  const LayerWeights& w = trunk_.layer(i);
  const RecurrentSpec& spec = model_.layers[i].recurrent;
  switch (model_.layers[i].attention.block) {
    case AttentionBlock::short_conv:
      return short_conv(compute_, spec, w.short_conv, batch_, ws_, input, first);
    case AttentionBlock::delta:
      return delta(compute_, spec, w.delta, batch_, ws_, input, first);
    case AttentionBlock::mamba2:
      return mamba2(compute_, spec, w.mamba2, batch_, ws_, input, first);
    case AttentionBlock::mamba:
      return mamba(compute_, spec, w.mamba, batch_, ws_, input, first);
    default:
      return;
  }
}

Status Forward::layer(size_t i, std::span<const Part> parts, size_t first) {
  const LayerWeights& w = trunk_.layer(i);
  const bool last = i + 1 == model_.layers.size();
  const size_t T = ids_.size(), from = last ? first : 0, rows = T - from;
  float* x = ws_.x + from * model_.hidden;
  Activations input(ws_.acts_32, ws_.acts_256);
  read(ws_.x, w.attn_norm, T, &input);
  for (size_t p = 0; p < parts.size(); ++p) {
    batch_[p].kv = &parts[p].kv->layer(i);
    batch_[p].recurrent = parts[p].kv->recurrent().layer(i);
  }
  mix(i, input, from);
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
  lap_.into(&buckets_.other);
  return Status::ok();
}

float* Forward::logits(size_t row, size_t rows) { return head(ws_.x + row * model_.hidden, rows); }

float* Forward::logits_of(std::span<const float* const> rows) {
  for (size_t i = 0; i < rows.size(); ++i) std::copy_n(rows[i], model_.hidden, ws_.x + i * model_.hidden);
  return head(ws_.x, rows.size());
}

float* Forward::head(const float* x, size_t rows) {
  lap_.into(&buckets_.other);
  Activations input(ws_.acts_32, ws_.acts_256);
  read(x, trunk_.final_norm(), rows, &input);
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
