// Matrix multiplication as the blocks use it: y = W x + b over a batch of rows, int8 activations where the weights are
// quantised, float32 where they are plain or where the caller asked for the float mode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "blocks/columns.h"
#include "kernels/kernels.h"
#include "util/threads.h"

namespace smoe {

// Rows are handed out in multiples of a panel.
inline constexpr size_t kTaskRows = 16;

// What a block computes with.
struct Compute {
  const Kernels* kernels = nullptr;
  ThreadPool* pool = nullptr;
  bool float_mode = false;
  ColumnSums* columns = nullptr;  // null = nobody counts

  ActFormat format(const Matrix& w) const { return float_mode ? ActFormat::none : act_format(w.encoding); }
};

struct Linear {
  Matrix weight;
  const float* bias = nullptr;  // [weight.rows] or null
};

// A batch of float32 rows and its int8 forms, quantised once on first use and shared by every matrix that reads it.
class Activations {
 public:
  Activations(uint8_t* q8_32, uint8_t* q8_256) : buffers_{nullptr, q8_32, q8_256} {}

  // x is [rows, cols], contiguous. Forgets what was quantised before.
  void bind(const float* x, size_t rows, size_t cols);
  const float* x() const { return x_; }
  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }
  // [rows, act_row_bytes(format, cols)]; null for ActFormat::none.
  const uint8_t* quantized(const Compute& c, ActFormat format);

 private:
  uint8_t* buffers_[3];
  bool ready_[3] = {};
  const float* x_ = nullptr;
  size_t rows_ = 0, cols_ = 0;
};

// Rows [row0, row1) of a matrix times `tokens` rows of a batch, from batch row `first` on: the unit every parallel loop
// hands out. index (may be null) picks the batch row of each token, counted from `first`.
void multiply(const Compute& c, const Matrix& w, const Activations& a, const uint8_t* acts, const uint32_t* index,
              size_t first, size_t tokens, size_t row0, size_t row1, float* y, size_t y_stride);

// Rows of a matrix that make one task for a batch of `tokens`: enough bytes to be worth handing out, few enough to
// share evenly.
size_t rows_per_task(const Compute& c, size_t rows, size_t tokens);

// Adds a bias (null: nothing) to entries [row0, row1) of `tokens` rows of y.
void add_bias(const float* bias, size_t tokens, size_t row0, size_t row1, float* y, size_t y_stride);

// y[t - first] = W x[t] + b for t in [first, a.rows()), y contiguous with stride weight.rows.
void linear(const Compute& c, const Linear& l, Activations& a, float* y, size_t first = 0);

// The same for several matrices that read one batch, in one parallel loop: a small one does not fill the threads.
struct Product {
  const Linear* linear;
  float* y;
  size_t first;
};
void linears(const Compute& c, std::initializer_list<Product> products, Activations& a);

}  // namespace smoe
