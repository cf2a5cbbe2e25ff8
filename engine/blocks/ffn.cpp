#include "blocks/ffn.h"

#include <algorithm>

namespace smoe {

void ffn(const Compute& c, const FfnSpec& spec, const FfnWeights& w, Activations& input, Workspace& ws, float* y) {
  const size_t T = input.rows(), width = w.gate.weight.rows, step = rows_per_task(c, width, T);
  const uint8_t* gate_acts = input.quantized(c, c.format(w.gate.weight));
  const uint8_t* up_acts = input.quantized(c, c.format(w.up.weight));
  c.pool->run((width + step - 1) / step, [&](size_t task, size_t) {
    const size_t r0 = task * step, r1 = std::min(width, r0 + step);
    multiply(c, w.gate.weight, input, gate_acts, nullptr, 0, T, r0, r1, ws.gate, width);
    multiply(c, w.up.weight, input, up_acts, nullptr, 0, T, r0, r1, ws.up, width);
    add_bias(w.gate.bias, T, r0, r1, ws.gate, width);
    add_bias(w.up.bias, T, r0, r1, ws.up, width);
    for (size_t t = 0; t < T; ++t) activate(c, spec, ws.gate + t * width + r0, ws.up + t * width + r0, r1 - r0);
  });
  Activations mid(ws.mid_32, ws.mid_256);
  mid.bind(ws.gate, T, width);
  linear(c, w.down, mid, y);
}

}  // namespace smoe
