// The order in which slots give way: a doubly linked list over slot numbers, least recently used first. No allocation
// after construction.
#pragma once

#include <cstdint>
#include <vector>

namespace smoe {

class LruList {
 public:
  // All slots 0 .. slots-1, in this order.
  explicit LruList(uint32_t slots) : links_(slots + 1) {
    for (uint32_t slot = 0; slot <= slots; ++slot)
      links_[slot] = {slot == 0 ? slots : slot - 1, (slot + 1) % (slots + 1)};
  }
  uint32_t first() const { return links_[end()].next; }
  uint32_t next(uint32_t slot) const { return links_[slot].next; }
  uint32_t end() const { return static_cast<uint32_t>(links_.size()) - 1; }

  void make_most_recent(uint32_t slot) { insert_before(end(), slot); }
  void make_least_recent(uint32_t slot) { insert_before(first(), slot); }

 private:
  struct Link {
    uint32_t previous, next;
  };
  void insert_before(uint32_t place, uint32_t slot) {
    if (place == slot) return;
    const Link old = links_[slot];
    links_[old.previous].next = old.next;
    links_[old.next].previous = old.previous;
    links_[slot] = {links_[place].previous, place};
    links_[links_[place].previous].next = slot;
    links_[place].previous = slot;
  }
  std::vector<Link> links_;  // a ring; the last entry is the end mark
};

}  // namespace smoe
