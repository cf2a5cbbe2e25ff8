// Keys and values of one layer of one session: per kv head a ring of `capacity` rows, row = position % capacity.
// Capacity is a multiple of the key tile, so a tile anchored at a multiple of kKeyTile is contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "smoe/plan.h"

namespace smoe {

// Bytes of one row of `dim` values; dim is a multiple of 32 for q8.
inline size_t kv_row_bytes(KvType type, size_t dim) {
  if (type == KvType::q8) return dim / Kv8Block::kValues * sizeof(Kv8Block);
  return dim * (type == KvType::f32 ? sizeof(float) : sizeof(uint16_t));
}

struct KvLayer {
  uint8_t* keys = nullptr;    // [kv_heads, capacity, head_dim] as `type` says: f32 in the float mode
  uint8_t* values = nullptr;  // the keys themselves where a block caches one row for both
  size_t capacity = 0, head_dim = 0;
  size_t window = 0;  // positions a query sees, itself included
  size_t chunk = 0;   // and of these only those in its own chunk of so many; 0 = all
  KvType type = KvType::f16;

  bool f32() const { return type == KvType::f32; }
  // The first position that a query at `position` sees.
  uint64_t oldest(uint64_t position) const {
    const uint64_t by_window = position + 1 > window ? position + 1 - window : 0;
    const uint64_t by_chunk = chunk == 0 ? 0 : position / chunk * chunk;
    return by_window > by_chunk ? by_window : by_chunk;
  }
  size_t row_bytes() const { return kv_row_bytes(type, head_dim); }
  uint8_t* key(size_t head, uint64_t position) const { return keys + at(head, position); }
  uint8_t* value(size_t head, uint64_t position) const { return values + at(head, position); }

 private:
  size_t at(size_t head, uint64_t position) const { return (head * capacity + position % capacity) * row_bytes(); }
};

}  // namespace smoe
