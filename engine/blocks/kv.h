// Keys and values of one layer of one session: per kv head a ring of `capacity` rows, row = position % capacity.
// Capacity is a multiple of the key tile, so a tile anchored at a multiple of kKeyTile is contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smoe {

struct KvLayer {
  uint8_t* keys = nullptr;    // [kv_heads, capacity, head_dim] of f16, or f32 in the float mode
  uint8_t* values = nullptr;  // the keys themselves where a block caches one row for both
  size_t capacity = 0, head_dim = 0;
  size_t window = 0;  // positions a query sees, itself included
  bool f32 = false;

  size_t row_bytes() const { return head_dim * (f32 ? 4 : 2); }
  uint8_t* key(size_t head, uint64_t position) const { return keys + at(head, position); }
  uint8_t* value(size_t head, uint64_t position) const { return values + at(head, position); }

 private:
  size_t at(size_t head, uint64_t position) const { return (head * capacity + position % capacity) * row_bytes(); }
};

}  // namespace smoe
