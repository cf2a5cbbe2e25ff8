// A first-in first-out queue on one array that only ever grows: no allocation once it has reached its working size.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace smoe {

template <class T>
class Fifo {
 public:
  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }
  void push(T item) {
    if (count_ == items_.size()) grow();
    items_[(first_ + count_) % items_.size()] = std::move(item);
    ++count_;
  }
  T pop() {
    T item = std::move(items_[first_]);
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  void grow() {
    std::vector<T> larger(items_.empty() ? 16 : items_.size() * 2);
    for (size_t i = 0; i < count_; ++i) larger[i] = std::move(items_[(first_ + i) % items_.size()]);
    items_.swap(larger);
    first_ = 0;
  }
  std::vector<T> items_;
  size_t first_ = 0, count_ = 0;
};

}  // namespace smoe
