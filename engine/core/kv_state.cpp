#include "core/kv_state.h"

#include <algorithm>

#include "blocks/workspace.h"

namespace smoe {
namespace {

size_t window_of(const AttentionSpec& a, uint32_t ctx) {
  const uint32_t window = a.window != 0 ? std::min(a.window, ctx) : ctx;
  return a.chunk != 0 ? std::min(a.chunk, window) : window;
}

// A chunk's rows are written before its first query reads: window + chunk rows live at once.
size_t capacity_of(const AttentionSpec& a, uint32_t ctx, uint32_t chunk) {
  return (window_of(a, ctx) + chunk + kKeyTile - 1) / kKeyTile * kKeyTile;
}

// Of the keys; the values take as much again, unless they are the keys.
uint64_t key_bytes(const AttentionSpec& a, uint32_t ctx, uint32_t chunk, KvType type) {
  if (a.is_recurrent()) return 0;
  return (uint64_t{a.kv_heads} * capacity_of(a, ctx, chunk) * kv_row_bytes(type, a.head_dim) + 63) / 64 * 64;
}

}  // namespace

uint64_t KvState::bytes(const ModelSpec& model, uint32_t ctx, uint32_t chunk, KvType type) {
  uint64_t sum = RecurrentState::bytes(model);
  for (const LayerSpec& layer : model.layers) {
    const AttentionSpec& a = layer.attention;
    sum += (a.shares_values() ? 1 : 2) * key_bytes(a, ctx, chunk, type);
  }
  return sum;
}

Result<KvState> KvState::allocate(const ModelSpec& model, uint32_t ctx, uint32_t chunk, KvType type) {
  KvState state;
  SMOE_ASSIGN(state.recurrent_, RecurrentState::allocate(model));
  SMOE_ASSIGN(state.memory_, AlignedBuffer::allocate(bytes(model, ctx, chunk, type) - RecurrentState::bytes(model)));
  uint8_t* at = state.memory_.data();
  for (const LayerSpec& layer : model.layers) {
    const AttentionSpec& a = layer.attention;
    if (a.is_recurrent()) {
      state.layers_.emplace_back();
      continue;
    }
    uint8_t* keys = at;
    at += key_bytes(a, ctx, chunk, type);
    uint8_t* values = a.shares_values() ? keys : at;
    if (!a.shares_values()) at += key_bytes(a, ctx, chunk, type);
    state.layers_.push_back({keys, values, capacity_of(a, ctx, chunk), a.head_dim, window_of(a, ctx), a.chunk, type});
  }
  return state;
}

bool KvState::can_roll_back(uint64_t written, uint64_t length) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const KvLayer& l) {
    if (l.capacity == 0) return true;
    const uint64_t oldest_needed = length + 1 > l.window ? length + 1 - l.window : 0;
    const uint64_t oldest_held = written > l.capacity ? written - l.capacity : 0;
    return oldest_needed >= oldest_held;
  });
}

}  // namespace smoe
