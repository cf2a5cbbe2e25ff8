// One resident conversation: the ids whose keys and values are held, and how much of a new request they already answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/kv_state.h"

namespace smoe {

class Conversation {
 public:
  explicit Conversation(KvState kv) : kv_(std::move(kv)) {}

  // Keeps the longest prefix of `ids` that is held and can be rolled back to exactly; at least the last id is left to
  // compute. Returns its length.
  uint32_t reuse(const std::vector<int32_t>& ids);
  // Rows for n more positions are about to be written: from here on the rows they replace in the rings count as lost,
  // even if the computation fails half-way.
  void reserve(size_t n) {
    written_ = std::max<uint64_t>(written_, held_.size() + n);
    kv_.recurrent().begin();
  }
  // ids[0, n) were computed after what is held.
  void append(const int32_t* ids, size_t n) {
    held_.insert(held_.end(), ids, ids + n);
    kv_.recurrent().done(held_.size());
  }
  // Drops what is held from where it differs from `ids` on, such as a guess that did not come true. The caller has
  // asked can_take_back() before computing it.
  void keep_prefix_of(const std::vector<int32_t>& ids);
  // May n positions after the next one be computed and then taken back exactly?
  bool can_take_back(size_t n) const;
  void clear();

  const KvState& kv() const { return kv_; }
  uint64_t length() const { return held_.size(); }

  std::string name;
  uint64_t last_use = 0;

 private:
  KvState kv_;
  std::vector<int32_t> held_;
  uint64_t written_ = 0;  // one past the highest position whose rows were written since the last cold start
};

}  // namespace smoe
