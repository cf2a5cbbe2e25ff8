#include "blocks/linear.h"

#include <algorithm>

namespace smoe {

void Activations::bind(const float* x, size_t rows, size_t cols) {
  x_ = x;
  rows_ = rows;
  cols_ = cols;
  ready_[1] = ready_[2] = false;
}

const uint8_t* Activations::quantized(const Compute& c, ActFormat format) {
  if (format == ActFormat::none) return nullptr;
  const auto f = static_cast<size_t>(format);
  if (ready_[f]) return buffers_[f];
  const size_t bytes = act_row_bytes(format, cols_);
  const size_t per_task = 8;  // rows; a decode step is one task and runs on the caller
  c.pool->run((rows_ + per_task - 1) / per_task, [&](size_t task, size_t) {
    const size_t r0 = task * per_task, n = std::min(per_task, rows_ - r0);
    c.kernels->quantize_act(format, x_ + r0 * cols_, n, cols_, cols_, buffers_[f] + r0 * bytes);
  });
  ready_[f] = true;
  return buffers_[f];
}

void multiply(const Compute& c, const Matrix& w, const Activations& a, const uint8_t* acts, const uint32_t* index,
              size_t first, size_t tokens, size_t row0, size_t row1, float* y, size_t y_stride) {
  if (c.columns != nullptr && row0 == 0) c.columns->saw(w, a.x() + first * a.cols(), tokens);
  if (acts == nullptr) {
    c.kernels->matmul_f32(w, a.x() + first * a.cols(), a.cols(), index, tokens, row0, row1, y, y_stride);
  } else {
    const size_t bytes = act_row_bytes(act_format(w.encoding), w.cols);
    c.kernels->matmul_q8(w, acts + first * bytes, index, tokens, row0, row1, y, y_stride);
  }
}

size_t rows_per_task(const Compute& c, size_t rows, size_t tokens) {
  const size_t share = rows / (c.pool->size() * 8) / kTaskRows * kTaskRows;
  // Many tokens pass over a task's weights again and again, which have to stay in the second-level cache; with few each
  // task begins with weights that nothing has prefetched.
  const size_t most = tokens > 8 ? 16 : 64;
  return std::clamp<size_t>(share, kTaskRows, most * kTaskRows);
}

void add_bias(const float* bias, size_t tokens, size_t row0, size_t row1, float* y, size_t y_stride) {
  if (bias == nullptr) return;
  for (size_t t = 0; t < tokens; ++t)
    for (size_t r = row0; r < row1; ++r) y[t * y_stride + r] += bias[r];
}

void linear(const Compute& c, const Linear& l, Activations& a, float* y, size_t first) {
  linears(c, {{&l, y, first}}, a);
}

void linears(const Compute& c, std::initializer_list<Product> products, Activations& a) {
  size_t rows = 0, tasks = 0;
  for (const Product& p : products) {
    rows += p.linear->weight.rows;
    a.quantized(c, c.format(p.linear->weight));
  }
  const size_t step = rows_per_task(c, rows, a.rows());
  const auto tasks_of = [step](const Product& p) { return (p.linear->weight.rows + step - 1) / step; };
  for (const Product& p : products) tasks += tasks_of(p);
  c.pool->run(tasks, [&](size_t task, size_t) {
    const Product* p = products.begin();
    for (; task >= tasks_of(*p); ++p) task -= tasks_of(*p);
    const Matrix& w = p->linear->weight;
    const size_t r0 = task * step, r1 = std::min<size_t>(w.rows, r0 + step), tokens = a.rows() - p->first;
    multiply(c, w, a, a.quantized(c, c.format(w)), nullptr, p->first, tokens, r0, r1, p->y, w.rows);
    add_bias(p->linear->bias, tokens, r0, r1, p->y, w.rows);
  });
}

}  // namespace smoe
