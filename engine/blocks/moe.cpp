#include "blocks/moe.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace smoe {
namespace {

// Sorts the (row, choice) pairs by expert. Returns how many distinct experts there are, listed in order of first use.
size_t group_by_expert(const FfnSpec& spec, size_t rows, Workspace& ws) {
  const size_t E = spec.experts, pairs = rows * spec.top_k;
  std::fill_n(ws.expert_begin, E + 1, 0u);
  size_t distinct = 0;
  for (size_t i = 0; i < pairs; ++i)
    if (ws.expert_begin[ws.chosen[i] + 1]++ == 0) ws.expert_order[distinct++] = ws.chosen[i];
  for (size_t e = 0; e < E; ++e) ws.expert_begin[e + 1] += ws.expert_begin[e];
  // A second walk places each pair; begin[e] moves to the end of e and is shifted back afterwards.
  for (size_t i = 0; i < pairs; ++i) {
    const uint32_t at = ws.expert_begin[ws.chosen[i]]++;
    ws.pair_of[i] = at;
    ws.pair_row[at] = static_cast<uint32_t>(i / spec.top_k);
    if (spec.scale_input) ws.pair_weight[at] = ws.weights[i];
  }
  for (size_t e = E; e > 0; --e) ws.expert_begin[e] = ws.expert_begin[e - 1];
  ws.expert_begin[0] = 0;
  for (size_t i = 0; i < distinct; ++i) {
    const uint32_t e = ws.expert_order[i];
    ws.expert_uses[i] = ws.expert_begin[e + 1] - ws.expert_begin[e];
  }
  return distinct;
}

class Experts {
 public:
  Experts(const Compute& c, const FfnSpec& spec, const MoeWeights& w, Activations& input, Workspace& ws)
      : c_(c),
        spec_(spec),
        moe_layer_(w.moe_layer),
        record_(w.record),
        input_(input),
        ws_(ws),
        mid_(ws.mid_32, ws.mid_256) {
    const Matrix gate = matrix(spec.encodings.gate, 0, nullptr), up = matrix(spec.encodings.up, 0, nullptr);
    gate_acts_ = input.quantized(c, c.format(gate));
    up_acts_ = input.quantized(c, c.format(up));
    const ActFormat format = c.format(down_of(nullptr));
    mid_bytes_ = format == ActFormat::none ? 0 : act_row_bytes(format, spec.expert_width);
    mid_acts_ = format == ActFormat::none ? nullptr : format == ActFormat::q8_32 ? ws.mid_32 : ws.mid_256;
  }

  // Computes these experts for all their rows, into ws.pair_out.
  void run(const std::vector<ExpertRef>& refs) {
    gate_and_up(refs);
    count_columns(refs);
    quantize_mid(refs);
    down(refs);
  }

 private:
  Matrix matrix(Encoding e, uint64_t offset, const uint8_t* record) const {
    return {e, layout(e), spec_.expert_width, input_.cols(), record + offset};
  }
  Matrix down_of(const uint8_t* record) const {
    const Encoding e = spec_.encodings.down;
    return {e, layout(e), input_.cols(), spec_.expert_width, record + record_.down};
  }
  static Layout layout(Encoding e) { return e <= Encoding::bf16 ? Layout::rows : Layout::panel16; }

  static const float* bias(const ExpertRef& r, uint64_t offset) {
    return offset == 0 ? nullptr : reinterpret_cast<const float*>(r.data + offset);
  }

  uint32_t first(const ExpertRef& r) const { return ws_.expert_begin[r.expert]; }
  uint32_t count(const ExpertRef& r) const { return ws_.expert_begin[r.expert + 1] - first(r); }

  void gate_and_up(const std::vector<ExpertRef>& refs) {
    const size_t width = spec_.expert_width, step = task_rows(width, refs.size());
    const size_t blocks = (width + step - 1) / step;
    c_.pool->run(refs.size() * blocks, [&](size_t task, size_t) {
      const ExpertRef& ref = refs[task / blocks];
      const size_t r0 = task % blocks * step, r1 = std::min(width, r0 + step), n = count(ref), at = first(ref);
      const uint32_t* rows = ws_.pair_row + at;
      float *g = ws_.gate + at * width, *u = ws_.up + at * width;
      multiply(c_, matrix(spec_.encodings.gate, record_.gate, ref.data), input_, gate_acts_, rows, 0, n, r0, r1, g,
               width);
      multiply(c_, matrix(spec_.encodings.up, record_.up, ref.data), input_, up_acts_, rows, 0, n, r0, r1, u, width);
      for (size_t j = 0; spec_.scale_input && j < n; ++j)  // the matrices are linear: as well after them as before
        for (size_t i = r0; i < r1; ++i) {
          g[j * width + i] *= ws_.pair_weight[at + j];
          u[j * width + i] *= ws_.pair_weight[at + j];
        }
      add_bias(bias(ref, record_.gate_bias), n, r0, r1, g, width);
      add_bias(bias(ref, record_.up_bias), n, r0, r1, u, width);
      for (size_t j = 0; j < n; ++j) activate(c_, spec_, g + j * width + r0, u + j * width + r0, r1 - r0);
    });
  }

  void count_columns(const std::vector<ExpertRef>& refs) {
    if (c_.columns == nullptr) return;
    const size_t hidden = input_.cols(), width = spec_.expert_width;
    for (const ExpertRef& ref : refs) {
      for (uint32_t i = first(ref); i < first(ref) + count(ref); ++i) {
        const float* input = input_.x() + ws_.pair_row[i] * hidden;
        c_.columns->saw(moe_layer_, ref.expert, ColumnSums::Part::input, input);
        c_.columns->saw(moe_layer_, ref.expert, ColumnSums::Part::middle, ws_.gate + i * width);
      }
    }
  }

  void quantize_mid(const std::vector<ExpertRef>& refs) {
    if (mid_acts_ == nullptr) return;
    const size_t width = spec_.expert_width;
    const ActFormat format = c_.format(down_of(nullptr));
    c_.pool->run(refs.size(), [&](size_t task, size_t) {
      const size_t at = first(refs[task]), n = count(refs[task]);
      c_.kernels->quantize_act(format, ws_.gate + at * width, n, width, width, mid_acts_ + at * mid_bytes_);
    });
  }

  void down(const std::vector<ExpertRef>& refs) {
    const size_t hidden = input_.cols(), width = spec_.expert_width, step = task_rows(hidden, refs.size());
    const size_t blocks = (hidden + step - 1) / step;
    mid_.bind(ws_.gate, 0, width);
    c_.pool->run(refs.size() * blocks, [&](size_t task, size_t) {
      const ExpertRef& ref = refs[task / blocks];
      const size_t r0 = task % blocks * step, r1 = std::min(hidden, r0 + step), at = first(ref);
      float* y = ws_.pair_out + at * hidden;
      multiply(c_, down_of(ref.data), mid_, mid_acts_, nullptr, at, count(ref), r0, r1, y, hidden);
      add_bias(bias(ref, record_.down_bias), count(ref), r0, r1, y, hidden);
    });
  }

  // With many experts ready, whole experts are tasks enough; with few they are cut finer.
  size_t task_rows(size_t rows, size_t experts) const {
    const size_t tasks = std::max<size_t>(1, c_.pool->size() * 8 / experts);
    return std::max(kTaskRows, (rows / tasks + kTaskRows - 1) / kTaskRows * kTaskRows);
  }

  const Compute& c_;
  const FfnSpec& spec_;
  const uint32_t moe_layer_;
  const RecordLayout& record_;
  Activations& input_;
  Workspace& ws_;
  Activations mid_;
  const uint8_t *gate_acts_ = nullptr, *up_acts_ = nullptr;
  uint8_t* mid_acts_ = nullptr;
  size_t mid_bytes_ = 0;
};

// y += the pairs' outputs, in router order.
void combine(const Compute& c, const FfnSpec& spec, size_t rows, size_t hidden, const Workspace& ws, float* y) {
  const size_t K = spec.top_k, columns = 512, blocks = (hidden + columns - 1) / columns;
  c.pool->run(rows * blocks, [&](size_t task, size_t) {
    const size_t t = task / blocks, c0 = task % blocks * columns, c1 = std::min(hidden, c0 + columns);
    for (size_t j = 0; j < K; ++j) {
      const float weight = spec.scale_input ? 1.0f : ws.weights[t * K + j];
      const float* out = ws.pair_out + size_t{ws.pair_of[t * K + j]} * hidden;
      for (size_t i = c0; i < c1; ++i) y[t * hidden + i] += weight * out[i];
    }
  });
}

// y = the always-on expert, scaled by its gate; zero where there is none.
void shared_expert(const Compute& c, const FfnSpec& spec, const MoeWeights& w, Activations& input, Workspace& ws,
                   float* y) {
  const size_t rows = input.rows(), hidden = input.cols();
  if (w.shared.gate.weight.data == nullptr) {
    std::fill_n(y, rows * hidden, 0.0f);
    return;
  }
  ffn(c, spec, w.shared, input, ws, y);
  if (w.shared_gate.weight.data == nullptr) return;
  for (size_t t = 0; t < rows; ++t) {
    float gate = 0;
    const Matrix& g = w.shared_gate.weight;
    c.kernels->matmul_f32(g, input.x() + t * hidden, hidden, nullptr, 1, 0, 1, &gate, 1);
    gate = 1.0f / (1.0f + std::exp(-gate));
    for (size_t i = 0; i < hidden; ++i) y[t * hidden + i] *= gate;
  }
}

}  // namespace

Status moe(const Compute& c, const FfnSpec& spec, const MoeWeights& w, ExpertCache& cache, Activations& input,
           Workspace& ws, float* y, std::vector<ExpertRef>& ready, const Ahead* ahead, Lap* lap, Buckets* buckets) {
  const size_t rows = input.rows();
  route(c, spec, w.router, input, ws);
  const size_t distinct = group_by_expert(spec, rows, ws);
  // Misses are on their way while the always-on expert and the residents are computed.
  Status status = cache.begin(w.moe_layer, ws.expert_order, distinct, ws.expert_uses, static_cast<uint32_t>(rows));
  if (status.is_ok() && ahead != nullptr) read_ahead(c, *ahead, cache, ws);
  lap->into(&buckets->router);
  shared_expert(c, spec, w, input, ws, y);
  Experts experts(c, spec, w, input, ws);
  while (status.is_ok()) {
    lap->into(&buckets->expert_compute);
    ready.clear();
    const Result<bool> more = cache.next(&ready);
    lap->into(&buckets->expert_wait);
    if (!more.is_ok()) status = more.status();
    if (!status.is_ok() || !more.value()) break;
    experts.run(ready);
    for (const ExpertRef& ref : ready) cache.release(ref);
  }
  cache.end();
  lap->into(&buckets->expert_wait);
  if (!status.is_ok()) return status;
  combine(c, spec, rows, input.cols(), ws, y);
  lap->into(&buckets->expert_compute);
  return status;
}

}  // namespace smoe
